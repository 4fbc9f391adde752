"""Offers: plans of less and less memory, all of which run otherwise; and plans that a file has held."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch

from strategies import StrategyError
from strategies.base import PlannedStep
from strategies.chunk.planning.chunk_plan import ChunkPlanner
from strategies.chunk.planning.offers import offers
from strategies.chunk.planning.plan_json import plan_from_json, plan_to_json
from strategies.estimate.operator_cost import machine_for
from tests.strategies.chunk.measuring import training_peak_bytes
from tests.strategies.chunk.planning.test_head_and_loss import (
    Results,
    built,
    of_results,
    step_outside,
    trained,
)

MACHINE = machine_for(torch.device("cpu"))


def planner_of(loss: str) -> tuple[ChunkPlanner, Any, Any]:
    model, inputs = built(loss, 3, 16)
    return ChunkPlanner.of(model, inputs, training=True, step=PlannedStep()), model, inputs


def test_offers_are_of_less_and_less_memory_and_all_differ() -> None:
    planner, *_ = planner_of("z-loss")
    found = offers(planner)
    peaks = [planner.unchunked_peak_bytes, *(each.predicted_peak_bytes for each in found)]
    assert len(found) > 1
    assert peaks == sorted(set(peaks), reverse=True)
    assert peaks[-1] == planner.plan(None).predicted_peak_bytes
    assert len({json.dumps(plan_to_json(each)["schedules"]) for each in found}) == len(found)


def test_there_is_no_offer_where_no_loop_needs_less() -> None:
    model = torch.nn.Linear(2, 2)
    step = PlannedStep()
    planner = ChunkPlanner.of(model, (torch.randn(1, 2),), training=True, step=step)
    assert offers(planner) == []


def test_a_plan_of_a_file_runs_as_the_plan_itself() -> None:
    planner, model, inputs = planner_of("weights, smoothing and ignored")
    plan = offers(planner)[-1]
    held = json.loads(json.dumps(plan_to_json(plan)))
    again = plan_from_json(held, MACHINE, None)
    assert json.loads(json.dumps(plan_to_json(again))) == held
    assert again.to_dict() == plan.to_dict()
    assert [each.decisions for each in again.schedulers.values()] == [
        each.decisions for each in plan.schedulers.values()
    ]
    planned, expected = again.apply(copy.deepcopy(model)), plan.apply(copy.deepcopy(model))
    assert all(map(torch.equal, trained(planned, inputs), trained(expected, inputs)))
    assert training_peak_bytes(planned, inputs) == plan.predicted_peak_bytes


def test_a_loss_that_has_joined_must_be_there() -> None:
    model, (hidden, labels) = Results(), built("sum", 3, 16)[1]
    step = step_outside(labels, may_join_loss=True)
    plan = ChunkPlanner.of(model, (hidden,), training=True, step=step).plan(None)
    held = plan_to_json(plan)
    assert plan_from_json(held, MACHINE, of_results).loss is of_results
    with pytest.raises(StrategyError) as caught:
        plan_from_json(held, MACHINE, None)
    assert str(caught.value) == (
        "chunk: the plan makes the loss part of the model, and this one reads more than outputs and targets; "
        "make the plan again for this loss"
    )


@pytest.mark.parametrize(
    "held", [{}, {"with_loss": False, "schedules": [{}]}, {"with_loss": False, "schedules": 3}]
)
def test_refusal_of_what_is_no_plan(held: dict[str, Any]) -> None:
    with pytest.raises(StrategyError) as caught:
        plan_from_json(held, MACHINE, None)
    assert str(caught.value) == "chunk: the file holds no chunks of this version; make it again"
