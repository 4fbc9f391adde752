"""Drivers killed with SIGKILL at random moments: what finished stays, and nothing runs twice.

Each sweep has points of two shapes. Its command is killed at random moments, drawn over the time that an
undisturbed one takes and counted from its start or, as often, from the line that says its plan, so that a
machine which became slower does not leave all of them to planning. It is started again until it ends by
itself. Every start of a trial leaves a trace in a file. On this machine, a trial that was running dies with
its driver and starts again; as a job of Slurm it lives on, and starts once.
"""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.records.store import Store
from tests.slurm.private_slurm import private_cluster
from tests.slurm.sweeps import Sweep, plan_line

OPTIONS = {"local": (), "slurm": ("hydra.launcher.poll_s=0.2",)}
SWEEPS = 10
"""Sweeps of each launcher."""
KILLS = 2
"""Drivers of a sweep that are killed."""
SEEDS = 3
"""Points of each shape."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where sweeps run.

    Fields:
        launcher: of their commands.
        folder: of their results.
    """

    launcher: str
    folder: Path

    def sweep(self, name: str) -> Sweep:
        axes = ("mesh=single,ddp2", f"seed=range(0,{SEEDS})")
        overrides = (f"hydra/launcher={self.launcher}", *axes, *OPTIONS[self.launcher])
        return Sweep(outputs_dir=self.folder, name=name, overrides=overrides)


@pytest.fixture(scope="module", params=OPTIONS)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    launcher: str = request.param
    with (
        private_cluster() if launcher == "slurm" else nullcontext() as cluster,
        pytest.MonkeyPatch.context() as patch,
    ):
        if cluster is not None:
            patch.setenv("SLURM_CONF", str(cluster.conf))
        yield Place(launcher=launcher, folder=tmp_path_factory.mktemp(launcher))


@pytest.fixture(scope="module")
def span_s(place: Place) -> float:
    """Return how long a sweep takes that nobody disturbs."""
    started_s = time.monotonic()
    place.sweep("undisturbed").run()
    return time.monotonic() - started_s


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SWEEPS))
def test_what_finished_stays_and_nothing_runs_twice(place: Place, span_s: float, seed: int) -> None:
    draw = random.Random(f"{seed} {place.launcher}")
    sweep = place.sweep(f"killed{seed}")
    finished: dict[str, tuple[str, int]] = {}
    for _ in range(KILLS):
        is_planned, moment_s = draw.random() < 0.5, draw.uniform(0, span_s)
        if not _is_killed(sweep.start(), moment_s, is_planned=is_planned):
            break  # it was faster than the one that nobody disturbed
        finished = _finished(sweep) | finished
    sweep.run()
    again = plan_line(sweep.run())
    ended, starts = _finished(sweep), sweep.starts()
    assert [record["status"] for record in sweep.records().values()] == ["ok"] * 2 * SEEDS
    assert {trial: found for trial, found in ended.items() if trial in finished} == finished
    if place.launcher == "slurm":
        assert {trial: count for trial, count in starts.items() if count > 1} == {}
    assert " 0 to run" in again


def _is_killed(driver: subprocess.Popen[str], moment_s: float, *, is_planned: bool) -> bool:
    """Kill a command `moment_s` after its start or its plan; return False where it was over before."""
    assert driver.stderr is not None
    if is_planned:
        next((line for line in driver.stderr if " to run, " in line), "")
    time.sleep(moment_s)
    driver.kill()
    driver.communicate()
    return driver.returncode == -signal.SIGKILL


def _finished(sweep: Sweep) -> dict[str, tuple[str, int]]:
    """Return digest of the record and number of starts of every trial that has a record."""
    store = Store(sweep.root)
    digests = {trial: store.digest(trial) for trial in sweep.records()}
    starts = sweep.starts()  # afterwards: a second start that began meanwhile shall not be overlooked
    return {trial: (digest, starts[trial]) for trial, digest in digests.items()}
