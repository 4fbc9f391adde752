"""What a point costs beyond its own compute: our agent against torchrun, interleaved in one run.

Every point is two gloo ranks that import what a trial imports (`harness.trial.run`, FSDP, tensor
parallelism), meet, run one all-reduce, and leave a result on disk. Its own compute, the all-reduce, is
timed inside the rank and subtracted. The first point of the agent pays for the imports and is shown in a
row of its own.

    python -m bench.overhead --part point_overhead --repeats 10
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
from rich.table import Table

import harness.trial.run
from bench.output import parser, publish
from bench.table import sample_table
from harness.ranks.agent import Agent
from harness.ranks.entry import RankContext
from harness.ranks.start import RankJob

RANKS = 2
TARGET_S = 0.3
"""Seconds that a point after the first may cost."""

TARGET_RATIO = 10
"""How many times cheaper than torchrun it should be."""

_PRELOAD = ("bench.overhead.point_overhead", harness.trial.run.__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Overheads:
    """Seconds a point beyond its own compute; equal indices were taken side by side."""

    agent_first_s: float
    agent_s: tuple[float, ...]
    torchrun_s: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """How many times the agent's median torchrun's is."""
        return median(self.torchrun_s) / median(self.agent_s)


def point(_payload: None, _context: RankContext) -> dict[str, float]:
    """Run the compute of a point; the entry of the agent's ranks."""
    return {"compute_s": _compute()}


def torchrun_point(result: Path) -> None:
    """Run the same compute in a rank that torchrun has started."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    compute_s = _compute()
    if dist.get_rank() == 0:
        result.write_text(json.dumps(compute_s), "utf-8")
    dist.barrier()
    os._exit(0)


def main(words: Sequence[str]) -> int:
    """Measure, print, write; times are never a reason to fail."""
    options = _options(words)
    if options.torchrun_point is not None:
        torchrun_point(options.torchrun_point)
    load_average = os.getloadavg()[0]
    overheads = _measure(options.repeats)
    protocol = {
        "ranks": RANKS,
        "repeats": options.repeats,
        "order": "agent, torchrun, agent, ...",
        "load_average_before": load_average,
    }
    results = {
        "agent_first_s": overheads.agent_first_s,
        "agent_s": overheads.agent_s,
        "torchrun_s": overheads.torchrun_s,
        "torchrun_over_agent": overheads.ratio,
    }
    publish(_table(overheads), options.out, protocol=protocol, results=results)
    return 0


def _options(words: Sequence[str]) -> argparse.Namespace:
    made = parser(__doc__, "point_overhead", "overhead")
    made.add_argument("--repeats", type=int, default=10)
    made.add_argument("--torchrun-point", type=Path, help=argparse.SUPPRESS)
    return made.parse_args(words)


def _measure(repeats: int) -> Overheads:
    ours_s: list[float] = []
    torchrun_s: list[float] = []
    with tempfile.TemporaryDirectory() as name, Agent(preload=_PRELOAD) as agent:
        folder = Path(name)
        first_s = _agent_overhead_s(agent, folder)
        for _ in range(repeats):
            ours_s.append(_agent_overhead_s(agent, folder))
            torchrun_s.append(_torchrun_overhead_s(folder))
    return Overheads(agent_first_s=first_s, agent_s=tuple(ours_s), torchrun_s=tuple(torchrun_s))


def _compute() -> float:
    started_s = time.perf_counter()
    dist.all_reduce(torch.ones(1024))
    return time.perf_counter() - started_s


def _agent_overhead_s(agent: Agent, folder: Path) -> float:
    job = RankJob(
        trial_dir=folder,
        entry="bench.overhead.point_overhead:point",
        payload=None,
        ranks=RANKS,
        deadline_s=120,
    )
    started_s = time.perf_counter()
    outcome = agent.run(job)
    wall_s = time.perf_counter() - started_s
    if outcome.error is not None:
        raise RuntimeError(f"agent: the point did not finish: {outcome.error.message}")
    return wall_s - float(outcome.results[0]["compute_s"])


def _torchrun_overhead_s(folder: Path) -> float:
    result = folder / "torchrun.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    program = ["-m", "bench.overhead", "--part=point_overhead", "--torchrun-point", str(result)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started_s = time.perf_counter()
    subprocess.run([*launcher, *program], check=True, env=environment)
    wall_s = time.perf_counter() - started_s
    return wall_s - float(json.loads(result.read_text("utf-8")))


def _table(overheads: Overheads) -> Table:
    samples_s = {
        "agent, first point": (overheads.agent_first_s,),
        "agent, later points": overheads.agent_s,
        "torchrun": overheads.torchrun_s,
    }
    title = (
        f"Overhead of a point of {RANKS} ranks, seconds; torchrun costs {overheads.ratio:.0f} times the agent"
    )
    return sample_table(samples_s, title=title, caption=f"targets: {TARGET_S:g} s, {TARGET_RATIO} times")
