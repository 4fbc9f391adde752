"""The initialisation of all of this project's own models."""

from __future__ import annotations

import math

from torch import nn

_STD = 0.02
_RESIDUAL_OUTPUTS = ("wo", "down")


def initialise(model: nn.Module, *, n_layers: int, by_fan_in: bool = False) -> None:
    """Draw weights from N(0, 0.02²) and zero biases; outputs into the residual stream get 0.02 / sqrt(2 L).

    Args:
        model: initialised in place.
        n_layers: half the branches that are added to a residual stream, L.
        by_fan_in: draw from N(0, 1 / fan-in) instead, for models of many narrow layers, whose signal 0.02
            would let fade; the fan-in of an embedding is its number of entries.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3;
    LeCun et al. 1998, "Efficient BackProp", section 4.6 (fan-in).
    """
    for fqn, module in model.named_modules():
        if not isinstance(module, nn.Linear | nn.Embedding | nn.Conv2d):
            continue
        is_output = fqn.rpartition(".")[2] in _RESIDUAL_OUTPUTS
        std = _fan_in(module) ** -0.5 if by_fan_in else _STD
        nn.init.normal_(module.weight, std=std / math.sqrt(2 * n_layers) if is_output else std)
        if not isinstance(module, nn.Embedding) and module.bias is not None:
            nn.init.zeros_(module.bias)


def _fan_in(module: nn.Linear | nn.Embedding | nn.Conv2d) -> int:
    if isinstance(module, nn.Embedding):
        return module.num_embeddings
    return module.weight[0].numel()
