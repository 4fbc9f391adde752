"""A small model of transformers, and the examination that variants of libraries share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies import Strategy, StrategyError, ac_variants
from tests.strategies.meters import measure
from tests.strategies.toys import toy

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'acbench[hf]'"
)

BLOCKS: dict[str, Any] = {"layers_fqn": "model.layers"}
A_MODEL_OF_OTHERS = pytest.param(
    toy,
    {},
    "ac: transformers switches it on in models of its own, and Toy is none; use model=hf, or ac=full",
    id="a model of others",
)
"""A row of what is refused, of each variant that calls a switch of transformers."""


def llama(dropout: float = 0.0) -> nn.Module:
    """Return four layers."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=32,
        vocab_size=32,
        attention_dropout=dropout,
        use_cache=False,
    )
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


class Logits(nn.Module):
    """The logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens).logits
        return logits


def assert_costs_the_same(theirs: Strategy, ours: Strategy) -> None:
    """Assert equal bytes and FLOPs, others than those of the plain model, and its gradients."""
    plain, *applied = llama(), theirs.apply(llama()), ours.apply(llama())
    tokens = torch.arange(16).view(2, 8)
    costs = [measure(Logits(model), tokens) for model in (plain, *applied)]
    assert costs[1] == costs[2] != costs[0]
    for model in applied:
        for (name, expected), given in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(given.grad, expected.grad), name  # type: ignore[arg-type]


def refusal(variant: str, model: nn.Module, **fields: Any) -> str:
    """Return why a variant is not made, or not applied."""
    with pytest.raises(StrategyError) as error:
        ac_variants[variant](**fields).apply(model)
    return str(error.value)
