"""accelerate: which layers `switch_on` wraps, what that costs, and what it leaves out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'acbench[accelerate]'")

from strategies import Strategy, ac_variants
from strategies.ac.accelerate import Accelerate
from strategies.ac.full import Full
from strategies.regions.region import regions
from tests.strategies.foreign.models import BLOCKS, Logits, assert_costs_the_same, llama, refusal
from tests.strategies.toys import toy


@pytest.mark.parametrize(
    "theirs",
    [
        pytest.param(Accelerate(), id="classes that the model names"),
        pytest.param(Accelerate(transformer_cls_names_to_wrap=("LlamaDecoderLayer",)), id="given classes"),
    ],
)
def test_it_costs_what_the_same_of_ours_costs(theirs: Strategy) -> None:
    assert_costs_the_same(theirs, Full(**BLOCKS, preserve_rng_state=False))


def test_random_numbers_are_not_restored() -> None:
    gradients: list[Tensor] = []
    for strategy in (ac_variants["none"](), Accelerate()):
        model = Logits(strategy.apply(llama(dropout=0.5)))
        torch.manual_seed(1)
        model(torch.arange(16).view(2, 8)).sum().backward()
        weight = model.model.get_parameter("model.layers.0.self_attn.q_proj.weight")
        assert weight.grad is not None
        gradients.append(weight.grad)
    assert not torch.equal(*gradients)


def test_a_model_that_names_no_classes_stays_as_it_is() -> None:
    assert regions(Accelerate().apply(toy())) == {}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        pytest.param(
            ("Block",),
            "ac: accelerate raised ValueError: Could not find the transformer layer class Block in the "
            "model.",
            id="a class that the model has not",
        ),
        pytest.param(
            "Block",
            "ac.transformer_cls_names_to_wrap: must be a list of class names, got 'Block'",
            id="a name for a list",
        ),
    ],
)
def test_refusals(names: Any, message: str) -> None:
    assert refusal("accelerate", llama(), transformer_cls_names_to_wrap=names) == message
