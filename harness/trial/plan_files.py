"""Files of the plans of AC that are made for a step: one for all ranks, or one for each kind of step."""

from __future__ import annotations

from pathlib import Path

from harness.experiment.mesh import Mesh
from strategies import Strategy


def file_of(file: Path, mesh: Mesh, rank: int) -> Path:
    """Return the plan file of one rank: `file`, or `plan-<kind>.json` where ranks take unlike steps."""
    return file.with_stem(f"{file.stem}-{mesh.kind(rank)}") if len(mesh.first_ranks()) > 1 else file


def plan_of_rank(ac: Strategy, mesh: Mesh, rank: int) -> Strategy:
    """Return a variant with the plan that is given for one rank, where one is given."""
    planner = ac.step_planner
    if planner is None or planner.plan_file is None:
        return ac
    return planner.with_plan(file_of(Path(planner.plan_file), mesh, rank))
