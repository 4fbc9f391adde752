"""What a point costs beyond its own compute: our agent against torchrun, interleaved in one run.

Every point is two gloo ranks that import what a real point imports (FSDP, tensor parallelism), meet,
run one all-reduce, and leave a result on disk. Its own compute, the all-reduce, is timed inside the rank
and subtracted. The first point of the agent pays for the imports and is shown in a row of its own.

    python -m bench.point_overhead --repeats 10 --out outputs/bench/point_overhead.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

from harness.agent import Agent, RankJob
from harness.ranks import RankContext

RANKS = 2


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


def main() -> None:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("outputs/bench/point_overhead.json"))
    parser.add_argument("--torchrun-point", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.torchrun_point is not None:
        torchrun_point(options.torchrun_point)
    figures = _measure(options.repeats)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")
    _print(figures)


def _measure(repeats: int) -> dict[str, Any]:
    ours_s: list[float] = []
    torchrun_s: list[float] = []
    with tempfile.TemporaryDirectory() as name, Agent(preload=("bench.point_overhead",)) as agent:
        folder = Path(name)
        first_s = _agent_overhead_s(agent, folder)
        for _ in range(repeats):
            ours_s.append(_agent_overhead_s(agent, folder))
            torchrun_s.append(_torchrun_overhead_s(folder))
    return {
        "ranks": RANKS,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "torch": torch.__version__,
        "agent_first_s": first_s,
        "agent_s": ours_s,
        "torchrun_s": torchrun_s,
        "torchrun_over_agent": statistics.median(torchrun_s) / statistics.median(ours_s),
    }


def _compute() -> float:
    started_s = time.perf_counter()
    dist.all_reduce(torch.ones(1024))
    return time.perf_counter() - started_s


def _agent_overhead_s(agent: Agent, folder: Path) -> float:
    job = RankJob(
        trial_dir=folder, entry="bench.point_overhead:point", payload=None, ranks=RANKS, deadline_s=120
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
    program = ["-m", "bench.point_overhead", "--torchrun-point", str(result)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started_s = time.perf_counter()
    subprocess.run([*launcher, *program], check=True, env=environment)
    wall_s = time.perf_counter() - started_s
    return wall_s - float(json.loads(result.read_text("utf-8")))


def _print(figures: dict[str, Any]) -> None:
    print(f"Overhead of a point, {figures['ranks']} gloo ranks, {figures['cores']} cores")
    print(f"{'launcher':<22}{'median':>10}{'lowest':>10}{'highest':>10}{'points':>8}")
    rows = (
        ("agent, first point", [figures["agent_first_s"]]),
        ("agent, later points", figures["agent_s"]),
        ("torchrun", figures["torchrun_s"]),
    )
    for name, samples_s in rows:
        columns = (statistics.median(samples_s), min(samples_s), max(samples_s))
        print(f"{name:<22}{''.join(f'{value_s:>8.3f} s' for value_s in columns)}{len(samples_s):>8}")
    print(f"torchrun / agent: {figures['torchrun_over_agent']:.0f}x")


if __name__ == "__main__":
    main()
