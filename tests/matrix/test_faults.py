"""What the record of each fault says, on every shape and launcher, and that no job is left."""

from __future__ import annotations

from itertools import product

import pytest

from tests.matrix.faults import models
from tests.matrix.faults.cases import CASES, GROUPS, LAUNCHERS, ON_SLURM, SHAPES
from tests.matrix.faults.sweep import Cell, cells_of
from tests.slurm.private_slurm import require_binaries

ALONE = {
    "a lane of the driver's is killed": ("local lanes", "agent 0 killed", "1x2"),
    "a preempted element runs again": ("slurm", "preempted", "1x1"),
    "an allocation loses its node": ("slurm_packed", "node down", "1x2"),
    "the agent of a step's second node is killed": ("slurm_packed", "agent 1 killed", "2x2"),
    "the agent of a job's second node is frozen": ("slurm", "agent 1 frozen", "2x2"),
}
"""Launcher, group and shape of cells that run in sweeps of their own."""
SWEEPS = {
    (launcher, group): shapes
    for launcher, group in product(LAUNCHERS, GROUPS)
    if (
        shapes := [
            shape
            for shape in SHAPES
            if (launcher, group, shape) not in ALONE.values()
            and any(case.group == group and case.is_at(launcher, shape) for case in CASES)
        ]
    )
}
"""Shapes of the other sweeps, by launcher and group."""


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "fault", "shape"), ALONE.values(), ids=ALONE)
def test_a_fault_is_named(launcher: str, fault: str, shape: str) -> None:
    require_binaries()
    (cell,) = cells_of(launcher, fault, [shape])
    assert (cell.found, cell.is_freed) == (cell.expected, True), cell.message


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "group"), SWEEPS)
def test_every_fault_is_named(launcher: str, group: str) -> None:
    if launcher in ON_SLURM:
        require_binaries()
    found = cells_of(launcher, group, SWEEPS[launcher, group])
    assert [cell for cell in found if not cell.is_right] == []


def test_every_case_has_its_place() -> None:
    assert {case.group for case in CASES} == GROUPS.keys()
    for case in CASES:
        assert callable(getattr(models, case.factory))
        assert set(case.launchers) <= LAUNCHERS.keys()
        assert set(case.shapes) <= SHAPES.keys()
        everywhere = set(case.launchers) == LAUNCHERS.keys() and set(case.shapes) == SHAPES.keys()
        assert everywhere == (case.absence == "")


@pytest.mark.parametrize(
    ("found", "is_freed"),
    [
        pytest.param(("lost", "SIGKILL", None, "build"), True, id="another phase"),
        pytest.param((), True, id="no record"),
        pytest.param(("lost", "SIGKILL", None, "instrument"), False, id="a job that stays"),
    ],
)
def test_a_wrong_end_is_seen(found: tuple[str | None, ...], is_freed: bool) -> None:
    expected = ("lost", "SIGKILL", None, "instrument")
    cell = Cell(
        case="agent 0 killed",
        launcher="slurm",
        shape="1x1",
        found=found,
        expected=expected,
        message=None,
        is_freed=is_freed,
    )
    assert not cell.is_right
