"""trl: what its selection keeps, where its offloading stands, and what is refused."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl", reason="trl is not installed: pip install 'acbench[trl]'")

from strategies import Strategy
from strategies.ac.full import Full
from strategies.ac.selective_op import SelectiveOp
from strategies.ac.trl import Trl
from strategies.foreign import trl_calls
from tests.strategies.foreign.models import (
    A_MODEL_OF_OTHERS,
    BLOCKS,
    Logits,
    assert_costs_the_same,
    llama,
    refusal,
)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        pytest.param(Trl(), SelectiveOp(**BLOCKS, save_ops=("attention",)), id="attention is kept"),
        pytest.param(Trl(selective=False), Full(**BLOCKS), id="nothing is selected"),
    ],
)
def test_it_costs_what_the_same_of_ours_costs(theirs: Strategy, ours: Strategy) -> None:
    assert_costs_the_same(theirs, ours)


def test_offloading_holds_what_autograd_saves() -> None:
    saved: list[Tensor] = []

    def packed(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(packed, lambda tensor: tensor)
    strategy = Trl(gradient_checkpointing=False, selective=False, activation_offloading=True)
    with (
        mock.patch.object(torch.accelerator, "is_available", return_value=True),
        mock.patch.object(trl_calls, "get_act_offloading_ctx_manager", return_value=hooks),
    ):
        model = Logits(strategy.apply(llama()))
    model(torch.arange(16).view(2, 8)).sum().backward()
    assert saved


@pytest.mark.parametrize(
    ("make", "fields", "message"),
    [
        A_MODEL_OF_OTHERS,
        pytest.param(
            llama,
            {"activation_offloading": True},
            "ac.activation_offloading: trl copies from the accelerator, which raises where torch finds no "
            "accelerator; use ac=offload or ac=full ac.offload=true",
            id="offloading without an accelerator",
        ),
        pytest.param(
            llama,
            {"gradient_checkpointing": False},
            "ac.selective: is true where ac.gradient_checkpointing is false, as trl refuses it; "
            "set ac.selective=false",
            id="a selection of nothing",
        ),
    ],
)
def test_refusals(make: Any, fields: dict[str, Any], message: str) -> None:
    with mock.patch.object(torch.accelerator, "is_available", return_value=False):
        assert refusal("trl", make(), **fields) == message
