"""The speed of predictions: what is asked, and when a target is reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from bench.prediction.prediction_speed import Case, Cost, cases, cost_of
from harness.errors import ConfigError
from harness.sweep.question import Answer, Question

_COST = Cost(
    name="one",
    wall_s=9.0,
    cpu_s=4.0,
    processes=1,
    resident_bytes=1 << 30,
    refused=[],
    target_s=5,
    target_bytes=None,
)


@pytest.mark.parametrize(
    ("cost", "has_reached"),
    [
        pytest.param(_COST, True, id="CPU seconds within the target on a busy machine"),
        pytest.param(replace(_COST, cpu_s=6.0), False, id="neither within"),
        pytest.param(replace(_COST, cpu_s=6.0, processes=2), True, id="CPU seconds of each of two processes"),
        pytest.param(replace(_COST, target_bytes=1 << 20), False, id="too much memory"),
        pytest.param(replace(_COST, refused=["no"]), False, id="not predicted"),
    ],
)
def test_a_target_is_reached(cost: Cost, has_reached: bool) -> None:
    assert cost.has_reached is has_reached


def test_every_point_is_asked_for_and_shares_the_seconds() -> None:
    asked: list[Question] = []

    def predict(questions: Sequence[Question]) -> list[Answer]:
        asked.extend(questions)
        return [Answer(refusal=ConfigError("model", "no"))] * len(questions)

    points = [f"model=mlp hardware=h100 batch_size={size}" for size in (2, 4)]
    cost = cost_of(Case(name="two", points=points, target_s=1, is_a_point=True, field="batch_size"), predict)
    assert [(each.experiment.batch_size, each.field) for each in asked] == [
        (2, "batch_size"),
        (4, "batch_size"),
    ]
    assert all(each.hardware is not None and each.hardware.name == "h100" for each in asked)
    assert cost.refused == ["model: no", "model: no"]


def test_the_long_sweeps_have_as_many_points_as_asked() -> None:
    assert sorted(len(case.points) for case in cases(20))[-2:] == [20, 20]
