"""What a point takes in fresh and in living processes: an agent of each kind, interleaved in one run.

A trivial point is two gloo ranks that meet, run one all-reduce and leave a result; what is beyond it is the
kind of process. A trial is gpt_nano under full AC without timed steps, alone and over two ranks. The first
point of each agent, which pays for imports or for the process that lives on, is left out.

    python -m bench.isolation --repeats 20
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from rich.table import Table

from bench.output import parser, publish
from bench.trials import experiments
from harness.ranks.agent import Agent, RankJob
from harness.trial.run import TrialPlan

ISOLATIONS = ("forkserver", "persistent")
MESHES = ("single", "shard2", "tp2")
_PRELOAD = ("bench.point_overhead", "harness.trial.run")
_TRIAL = ("ac=full", "mesh.device=cpu", "protocol=smoke", "protocol.timed_pairs=0")
_DEADLINE_S = 300.0

Seconds = Mapping[str, Sequence[float]]
"""By isolation; equal indices were taken side by side."""


def main() -> int:
    """Measure, print, write; times are never a reason to fail."""
    made = parser(__doc__, "isolation")
    made.add_argument("--repeats", type=int, default=20)
    options = made.parse_args()
    protocol = {
        "repeats": options.repeats,
        "order": "forkserver, persistent, forkserver, ...",
        "load_average_before": os.getloadavg()[0],
    }
    with tempfile.TemporaryDirectory() as folder:
        found = {name: _measure(job, options.repeats) for name, job in _jobs(Path(folder)).items()}
    publish(_table(found), options.out, protocol=protocol, results=found)
    return 0


def _jobs(folder: Path) -> dict[str, RankJob]:
    trivial = RankJob(
        trial_dir=folder, entry="bench.point_overhead:point", payload=None, ranks=2, deadline_s=_DEADLINE_S
    )
    chosen = experiments([(*_TRIAL, f"mesh={mesh}") for mesh in MESHES])
    trials = {
        f"gpt_nano, {mesh}": RankJob(
            trial_dir=folder,
            entry="harness.trial.run:run",
            payload=TrialPlan(experiment=experiment),
            ranks=experiment.mesh.world_size,
            deadline_s=_DEADLINE_S,
        )
        for mesh, experiment in zip(MESHES, chosen, strict=True)
    }
    return {"trivial, 2 ranks": trivial, **trials}


def _measure(job: RankJob, repeats: int) -> Seconds:
    times_s: dict[str, list[float]] = {isolation: [] for isolation in ISOLATIONS}
    with Agent(_PRELOAD) as fresh, Agent(_PRELOAD, isolation="persistent") as living:
        agents = dict(zip(ISOLATIONS, (fresh, living), strict=True))
        for agent in agents.values():
            _run_s(agent, job)
        for _ in range(repeats):
            for isolation, agent in agents.items():
                times_s[isolation].append(_run_s(agent, job))
    return times_s


def _run_s(agent: Agent, job: RankJob) -> float:
    started_s = time.perf_counter()
    outcome = agent.run(job)
    if outcome.error is not None:
        raise RuntimeError(f"the point did not finish: {outcome.error.message}")
    return time.perf_counter() - started_s


def _table(found: Mapping[str, Seconds]) -> Table:
    table = Table(title="Seconds of a point, median (lowest to highest)")
    table.add_column("point")
    for heading in (*ISOLATIONS, "forkserver / persistent"):
        table.add_column(heading, justify="right")
    for name, seconds in found.items():
        medians = [median(seconds[isolation]) for isolation in ISOLATIONS]
        cells = [
            f"{median(each):.3f} ({min(each):.3f} to {max(each):.3f})"
            for each in (seconds[isolation] for isolation in ISOLATIONS)
        ]
        table.add_row(name, *cells, f"{medians[0] / medians[1]:.2f}")
    return table


if __name__ == "__main__":
    sys.exit(main())
