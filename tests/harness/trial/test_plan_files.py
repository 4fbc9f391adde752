"""Files of plans: one for all ranks, or one for each kind of step."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.experiment.mesh import Mesh
from harness.trial.plan_files import file_of, plan_of_rank
from strategies.ac.budget import Budget


@pytest.mark.parametrize(
    ("mesh", "names"),
    [
        (Mesh(dp_shard=2), ["plan"] * 2),
        (Mesh(pp=2), ["plan-0", "plan-1"]),
        (Mesh(cp=2), ["plan"] * 2),
        (Mesh(dp_replicate=2, cp=2, cp_method="ring"), ["plan-0", "plan-1"] * 2),
    ],
    ids=lambda value: value.label if isinstance(value, Mesh) else "",
)
def test_a_rank_reads_the_plan_of_its_step(mesh: Mesh, names: list[str]) -> None:
    given, asked = Budget(plan_file="of/plan.json"), Budget(fraction=0.5)
    files = [file_of(Path("of/plan.json"), mesh, rank) for rank in range(mesh.world_size)]
    assert files == [Path("of", f"{name}.json") for name in names]
    assert [plan_of_rank(given, mesh, rank) for rank in range(mesh.world_size)] == [
        Budget(plan_file=str(file)) for file in files
    ]
    assert plan_of_rank(asked, mesh, 0) is asked
