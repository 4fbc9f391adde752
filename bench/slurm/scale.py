"""A large sweep of trivial points on a private Slurm of many nodes: every point has its record at the end.

The command is then repeated and finds nothing to run. Lanes are kept to one a node, for the memory of the
machine that plays all nodes.

    python -m bench.slurm --part scale --nodes 16 --gpus 8 --points 200
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from bench.output import parser, publish
from bench.slurm.sweeps import Sweep, plan_line, private_slurm
from bench.table import table_of

LAUNCHERS = ("slurm_packed", "slurm")


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepResult:
    """What a sweep came to.

    Fields:
        launcher: launcher that ran it.
        plan: line of the command that says what is to run.
        statuses: number of records of each status.
        nodes: number of nodes that ran trials.
        starts: number of starts of trials.
        sweep_s: wall-clock time of the command.
        again: that line of the repeated command.
    """

    launcher: str
    plan: str
    statuses: dict[str, int]
    nodes: int
    starts: int
    sweep_s: float
    again: str

    def is_whole(self, points: int) -> bool:
        """Whether each point ran once, has a record of status `ok`, and does not run again."""
        is_done = self.statuses == {"ok": points} and self.starts == points
        return is_done and self.again == f"{points} points: 0 to run, {points} done, 0 duplicates"


def main(words: Sequence[str]) -> int:
    """Run, print, write; return 1 when a record is missing."""
    options = _options(words)
    found: list[SweepResult] = []
    with (
        private_slurm(nodes=options.nodes, gpus=options.gpus),
        tempfile.TemporaryDirectory() as folder,
    ):
        for launcher in options.launchers:
            found.append(_run(launcher, Path(folder), options))
            print(found[-1], file=sys.stderr)
    protocol = {name: getattr(options, name) for name in ("nodes", "gpus", "points")}
    results = [asdict(outcome) for outcome in found]
    publish(_table(found, options), options.out, protocol=protocol, results=results)
    return int(not all(outcome.is_whole(options.points) for outcome in found))


def _options(words: Sequence[str]) -> argparse.Namespace:
    made = parser(__doc__, "scale", "slurm")
    made.add_argument("--nodes", type=int, default=16)
    made.add_argument("--gpus", type=int, default=8, help="of each node")
    made.add_argument("--points", type=int, default=200)
    made.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=["slurm_packed"])
    return made.parse_args(words)


def _run(launcher: str, folder: Path, options: argparse.Namespace) -> SweepResult:
    limits = {
        "slurm_packed": (f"hydra.launcher.nodes={options.nodes}", "hydra.launcher.cpus_per_rank=8"),
        "slurm": (f"hydra.launcher.array_parallelism={options.nodes}",),
    }
    overrides = (f"hydra/launcher={launcher}", f"seed=range(0,{options.points})", *limits[launcher])
    sweep = Sweep(outputs_dir=folder, name=launcher, overrides=overrides)
    started_s = time.monotonic()
    said = sweep.run()
    sweep_s = time.monotonic() - started_s
    records = sweep.records().values()
    return SweepResult(
        launcher=launcher,
        plan=plan_line(said),
        statuses=dict(Counter(record["status"] for record in records)),
        nodes=len({host for record in records for host in record["environment"]["job"]["hosts"]}),
        starts=sum(sweep.starts().values()),
        sweep_s=sweep_s,
        again=plan_line(sweep.run()),
    )


def _table(found: list[SweepResult], options: argparse.Namespace) -> Table:
    return table_of(
        found,
        {
            "launcher": "launcher",
            "plan": "plan",
            "records": lambda row: ", ".join(f"{count} {status}" for status, count in row.statuses.items()),
            "the command again": "again",
            "nodes used": "nodes",
            "starts": "starts",
            "seconds": "sweep_s:.0f",
        },
        title=f"{options.points} points on {options.nodes} nodes of {options.gpus} GPUs",
    )
