from __future__ import annotations

from collections import Counter
from contextlib import suppress
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pytest
from torch import nn

from strategies import StrategyError
from strategies.shard.megatron import Megatron
from strategies.shard.model.graph import TensorAxis
from strategies.shard.model.shard_plan import ShardPlan
from tests.strategies.shard.models import AXIS, SAMPLE, Chain, Sorted, Unlisted, meta

_ACTIVATION = 4 * 6 * 8 * 4


@cache  # several tests look at one plan
def _plan() -> ShardPlan:
    return Megatron().plan(meta(Chain), SAMPLE, AXIS)


def test_linears_run_by_column_and_then_by_row() -> None:
    plan = _plan()
    assert plan.as_json()["candidates"] == {
        "embedding": "replicated",
        "blocks.0.norm": "replicated",
        "blocks.0.up": "RS0 = RR x RS0",
        "blocks.0.down": "RR = RS0 x S0R",
        "blocks.1.norm": "replicated",
        "blocks.1.up": "RS0 = RR x RS0",
        "blocks.1.down": "RR = RS0 x S0R",
        "head": "RR = RR x RR",
    }


def test_each_pair_is_all_reduced_once_forward_and_once_backward() -> None:
    plan = _plan()
    found = Counter((each.phase, each.kind, each.payload_bytes) for each in plan.collectives)
    assert found == {("forward", "all_reduce", _ACTIVATION): 2, ("backward", "all_reduce", _ACTIVATION): 2}
    assert plan.communicated_bytes == 4 * _ACTIVATION


def test_the_plan_is_written_down() -> None:
    written = _plan().as_json()
    assert written["resharding"] == [
        {"module": f"blocks.{index}.up", "operand": "input", "from": "R", "to": "R*"} for index in range(2)
    ]
    assert written["collectives"] == [
        {"phase": "forward", "kind": "all_reduce", "payload_bytes": _ACTIVATION, "count": 2},
        {"phase": "backward", "kind": "all_reduce", "payload_bytes": _ACTIVATION, "count": 2},
    ]
    assert (written["ranks"], written["communicated_bytes"]) == (2, 4 * _ACTIVATION)


def test_refuses_a_model_without_a_plan() -> None:
    with pytest.raises(StrategyError) as refusal:
        Megatron().plan(meta(Chain), SAMPLE, TensorAxis(ranks=2, splits={}))
    assert (
        str(refusal.value) == "shard: needs linears that the model's tensor parallel plan splits; it has none"
    )


def test_refuses_code_that_is_not_known_to_run_on_a_shard() -> None:
    with pytest.raises(StrategyError) as refusal:
        Megatron().plan(meta(Unlisted), SAMPLE, AXIS)
    line = Sorted.forward.__code__.co_firstlineno + 1
    assert str(refusal.value) == (
        "shard: the code between the linears that the model's tensor parallel plan splits is not known "
        f"to run on a shard of features: 'sort' at models.py:{line} reads 'relu'; "
        "use shard=none and mesh.tp=1"
    )


def test_planning_leaves_the_generators_of_modules_as_they_are() -> None:
    model = meta(Chain)
    numbers = np.random.default_rng(0)
    model.blocks[0].numbers = numbers  # type: ignore[index, union-attr, assignment]
    forward = type(model).forward

    def drawing(self: nn.Module, *args: Any) -> Any:
        return forward(self, *args) * float(numbers.random())  # type: ignore[arg-type]

    with mock.patch.object(type(model), "forward", drawing), suppress(StrategyError):
        Megatron().plan(model, SAMPLE, AXIS)
    assert numbers.bit_generator.state == np.random.default_rng(0).bit_generator.state
