"""Adapters on a frozen model: what is trained is compared, and the base gets no gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import acbench
from strategies import Strategy, ac_variants
from strategies.ac.full import Full
from strategies.foreign.transformers_calls import of_transformers
from tests.strategies.foreign.models import llama

VOCABULARY, WIDTH = 32, 16
TOKENS = torch.arange(16).view(2, 8)


class Adapted(nn.Module):
    """A frozen linear with a trained product of rank two."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.base(x) + self.up(self.down(x))
        return outputs


class Adapters(nn.Module):
    """Frozen embedding, blocks of one adapted linear, and a frozen head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(
            nn.Sequential(Adapted(nn.Linear(WIDTH, WIDTH)), nn.Tanh()) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY).requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def reentrant(model: Adapters) -> None:
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=True)


def by_peft() -> nn.Module:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'acbench[peft]'")
    torch.manual_seed(0)
    model: nn.Module = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    return model


def of(library: str, **fields: Any) -> Strategy:
    pytest.importorskip(library, reason=f"{library} is not installed: pip install 'acbench[{library}]'")
    return ac_variants[library](**fields)


PEFT = "base_model.model.model.layers"
TRAINED: dict[str, Callable[[], Strategy]] = {
    "full": lambda: Full(layers_fqn=PEFT),
    "full, reentrant": lambda: Full(layers_fqn=PEFT, use_reentrant=True),
    "transformers": lambda: of("transformers"),
    "transformers, reentrant": lambda: of("transformers", use_reentrant=True),
    "trl": lambda: of("trl"),
}


@pytest.mark.parametrize("make", TRAINED.values(), ids=TRAINED)
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
def test_adapters_of_peft_get_the_gradients_of_the_plain_model(make: Callable[[], Strategy]) -> None:
    plain, model = by_peft(), make().apply(by_peft())
    for each in (plain, model):
        each(input_ids=TOKENS).logits.square().sum().backward()
    given = dict(model.named_parameters())
    for name, expected in plain.named_parameters():
        assert (expected.grad is not None) == ("lora" in name)
        assert (given[name].grad is None) == (expected.grad is None), name
        assert expected.grad is None or torch.equal(given[name].grad, expected.grad), name  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
def test_the_model_inside_of_adapters_is_found() -> None:
    model = by_peft()
    assert of_transformers(model) is model.get_submodule("base_model.model")


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_of_what_a_user_adapts_a_variant_that_trains_nothing_is_no_neutral_one() -> None:
    variants: dict[str, Any] = {"full": Full(layers_fqn="blocks"), "reentrant": reentrant}
    found = acbench.compare(Adapters, (TOKENS,), variants, lambda logits: logits.square().sum(), pairs=0)
    assert found["full"].verdict == "neutral"
    assert found["full"].recomputed_flops > 0
    assert found["reentrant"].verdict == "differs"
    assert "depends on no parameter that requires a gradient" in found["reentrant"].reason
