"""The initialisation of all of this project's own models."""

from __future__ import annotations

import math

from torch import nn

_STD = 0.02
_RESIDUAL_OUTPUTS = ("wo", "down")


def initialise(model: nn.Module, *, n_layers: int) -> None:
    """Draw weights from N(0, 0.02²) and zero biases; outputs into the residual stream get 0.02 / sqrt(2 L).

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3.
    """
    for fqn, module in model.named_modules():
        if not isinstance(module, nn.Linear | nn.Embedding):
            continue
        is_output = fqn.rpartition(".")[2] in _RESIDUAL_OUTPUTS
        nn.init.normal_(module.weight, std=_STD / math.sqrt(2 * n_layers) if is_output else _STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
