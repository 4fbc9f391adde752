from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from strategies.base import StrategyError
from strategies.estimate.machine import A100, Machine

SLOW = Machine(
    flops_per_s=100.0,
    bytes_per_s=10.0,
    launch_s=0.5,
    half_rows=4,
    link_bytes_per_s=20.0,
    latency_s=0.25,
    host_bytes_per_s=5.0,
)


@pytest.mark.parametrize(
    ("flops", "moved", "rows", "seconds"),
    [
        pytest.param(1000, 10, 0, 10.5, id="limited by FLOPs"),
        pytest.param(100, 30, 0, 3.5, id="limited by memory"),
        pytest.param(0, 0, 0, 0.5, id="a launch alone"),
        pytest.param(1000, 10, 4, 20.5, id="half of the speed at so many rows"),
    ],
)
def test_an_operator_takes_a_roofline_and_a_launch(flops: int, moved: int, rows: int, seconds: float) -> None:
    assert SLOW.operator_s(flops, moved, rows) == seconds


def test_a_collective_takes_a_latency_and_its_bytes() -> None:
    assert SLOW.collective_s(30) == 1.75


@pytest.mark.parametrize(
    ("overlaps", "window_s", "seconds"),
    [
        pytest.param(True, 1.5, 2.5, id="half a second longer than its window, and back"),
        pytest.param(True, 9.0, 2.0, id="back"),
        pytest.param(False, 9.0, 4.0, id="both ways"),
    ],
)
def test_values_on_the_host_are_waited_for(overlaps: bool, window_s: float, seconds: float) -> None:
    assert replace(SLOW, is_asynchronous=overlaps).offload_s(10, window_s) == seconds


@pytest.mark.parametrize(("seconds", "waited_s"), [(1.0, 0.0), (3.0, 1.0)])
def test_python_is_waited_for_where_operators_do_not_run_beside_it(seconds: float, waited_s: float) -> None:
    found = [replace(SLOW, is_asynchronous=each).not_hidden_s(seconds, 2.0) for each in (False, True)]
    assert found == [seconds, waited_s]


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        pytest.param("flops_per_s", 0, "must be positive and finite, got 0", id="no FLOPs"),
        pytest.param("link_bytes_per_s", -1.0, "must be positive and finite, got -1.0", id="negative link"),
        pytest.param("bytes_per_s", float("inf"), "must be positive and finite, got inf", id="endless"),
        pytest.param("latency_s", -1e-6, "must be at least 0 and finite, got -1e-06", id="latency"),
    ],
)
def test_a_machine_that_cannot_be(name: str, value: float, problem: str) -> None:
    wrong: dict[str, Any] = {name: value}
    with pytest.raises(StrategyError) as error:
        replace(A100, **wrong)
    assert str(error.value) == f"machine.{name}: {problem}"
