"""From the outcome of a trial to its record, with ranks that only write files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.launchers.resource_shape import Resources
from harness.launchers.run_task import PRELOAD, run_task
from harness.ranks import agent
from harness.ranks.culprit import Outcome
from harness.ranks.rank_report import keep
from harness.ranks.start import RankJob
from harness.records.record import Failure
from harness.records.store import Store
from tests.harness.records_fixture import rank_result
from tests.harness.sweeping import task


@pytest.mark.parametrize(
    ("measured_ranks", "message", "verdict"),
    [
        pytest.param(
            2,
            "no result within 30 s; rank 1 is in timing",
            "neutral",
            id="all ranks were being timed",
        ),
        pytest.param(
            1,
            "no result within 30 s; rank 1 is in build",
            "unverified",
            id="one rank had nothing",
        ),
        pytest.param(
            2,
            "the job's time is over",
            "neutral",
            id="the scheduler's time was over",
        ),
    ],
)
def test_what_was_measured_before_the_deadline_stays(
    tmp_path: Path, measured_ranks: int, message: str, verdict: str
) -> None:
    def late(job: RankJob) -> Outcome:
        for rank in range(measured_ranks):
            keep(job.trial_dir, rank, rank_result(rank) | {"time": None})
        return Outcome(status="timeout", error=Failure(kind="timeout", message=message, phase="timing"))

    trial, store = task(mesh="mesh=shard2 ac=full"), Store(tmp_path)
    record = run_task(
        trial,
        late,
        call=lambda *_, **__: None,
        store=store,
        name="late",
        resources=Resources(core_count=1),
        job={},
    )
    assert record.error is not None
    assert (record.status, record.error.phase, record.error.message) == ("timeout", "timing", message)
    assert (record.verdict, record.time) == (verdict, None)
    assert (record.memory is None) == (verdict == "unverified")
    assert store.read(trial.trial_id) == record


def test_what_was_never_compared_has_no_tolerance(tmp_path: Path) -> None:
    no_room = Outcome(
        status="refused", error=Failure(kind="ConfigError", message="no chunk plan", phase="build")
    )
    record = run_task(
        task(mesh="mesh=single chunk=budget chunk.fraction=0.5"),
        lambda _: no_room,
        call=lambda *_, **__: None,
        store=Store(tmp_path),
        name="refused",
        resources=Resources(core_count=1),
        job={},
    )
    assert (record.status, record.note) == ("refused", None)


@pytest.fixture(scope="module")
def of_a_rank() -> list[str]:
    """What a fresh process imports with what ranks do: of the driver's packages, and by leaving modes."""
    names = {each.partition(":")[0] for each in (*agent.PRELOAD, *PRELOAD)}
    program = f"""
import importlib, sys
for name in {names}:
    importlib.import_module(name)
print([name for name in ("wandb", "hydra") if name in sys.modules])
from torch.utils._python_dispatch import _disable_current_modes
known = set(sys.modules)
with _disable_current_modes():
    print(sorted(set(sys.modules) - known))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


def test_ranks_never_import_wandb(of_a_rank: list[str]) -> None:
    assert of_a_rank[0] == "[]"


def test_a_rank_leaves_modes_without_opening_a_file(of_a_rank: list[str]) -> None:
    assert of_a_rank[1] == "[]"
