"""A fault from outside ends in a record that says so; part of the matrix of `bench.slurm.faults`."""

from __future__ import annotations

import pytest

from bench.slurm.fault_cases import CASES, GROUPS, LAUNCHERS, SHAPES
from bench.slurm.faults import matrix
from tests.slurm.private_slurm import require_binaries


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "fault", "shape"),
    [
        pytest.param(
            "local lanes",
            "agent 0 killed",
            "1x2",
            id="a lane of the driver's is killed",
            marks=pytest.mark.matrix,
        ),
        pytest.param("slurm", "preempted", "1x1", id="a preempted element runs again"),
        pytest.param("slurm_packed", "node down", "1x2", id="an allocation loses its node"),
        pytest.param(
            "slurm_packed",
            "agent 1 killed",
            "2x2",
            id="the agent of a step's second node is killed",
            marks=pytest.mark.matrix,
        ),
        pytest.param("slurm", "agent 1 frozen", "2x2", id="the agent of a job's second node is frozen"),
    ],
)
def test_a_fault_is_named(launcher: str, fault: str, shape: str) -> None:
    require_binaries()
    (cell,) = matrix(faults=[fault], launchers=[launcher], shapes=[shape])
    assert (cell.found, cell.is_freed) == (cell.expected, True), cell.message


def test_every_case_has_its_place() -> None:
    assert {case.group for case in CASES} == GROUPS.keys()
    for case in CASES:
        assert set(case.launchers) <= LAUNCHERS.keys()
        assert set(case.shapes) <= SHAPES.keys()
        everywhere = set(case.launchers) == LAUNCHERS.keys() and set(case.shapes) == SHAPES.keys()
        assert everywhere == (case.absence == "")
