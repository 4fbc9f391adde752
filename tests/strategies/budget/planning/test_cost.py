"""What plans make least."""

from __future__ import annotations

import pytest

from strategies.budget.planning.cost import Cost, Objective
from strategies.budget.planning.simulation import Work

_STEP_FLOPS, _STEP_S = 1000, 0.1
_FEWEST = (10, 0.05)
_FASTEST = (200, 0.0)
_BETWEEN = (100, 0.02)


@pytest.mark.parametrize(
    ("objective", "least"),
    [
        ("flops", _FEWEST),  # 1 % of FLOPs, 50 % of the time
        ("time", _FASTEST),  # 20 %, 0 %
        ("both", _FASTEST),  # 10 % and 20 % are more
    ],
)
def test_an_objective_decides(objective: Objective, least: tuple[int, float]) -> None:
    cost = Cost.of(objective, _STEP_FLOPS, _STEP_S)
    assert min((_FEWEST, _FASTEST, _BETWEEN), key=lambda work: cost(Work(*work))) == least


def test_both_weighs_the_share_of_flops_and_the_share_of_time_alike() -> None:
    cost = Cost.of("both", _STEP_FLOPS, _STEP_S)
    assert cost(Work(10, 0.0)) == pytest.approx(cost(Work(0, 0.001)))


def test_of_equal_flops_the_fastest_costs_least() -> None:
    cost = Cost.of("flops", _STEP_FLOPS, _STEP_S)
    assert cost(Work(10, 0.0)) < cost(Work(10, 0.001)) < cost(Work(11, 0.0))


@pytest.mark.parametrize("objective", ["flops", "time", "both"])
def test_a_step_without_flops_or_seconds_costs_nothing_endless(objective: Objective) -> None:
    cost = Cost.of(objective, 0, 0.0)
    assert cost(Work(0, 0.0)) == 0.0
    assert cost(Work(0, 1.0)) < float("inf")
