"""Where the wall time of a trial goes, beside the training steps that it takes.

Each trial is a command in a process of its own, without a tracker. The driver and rank 0 note what they do
from the start of the process to its end; a second counts for the innermost part that it was spent in. Steps
are those of a model: before the meters, under the meters, for parity, for warm-up, timed. CPU seconds stand
beside wall seconds, because other programs of the machine lengthen only the latter. The last row leaves out
what every program waits for that trains with torch: Python, torch, and what the first optimizer imports.

    python -m bench.overhead --part trial_cost --protocols smoke,standard
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.output import parser, publish
from strategies.estimate.patched import replaced

TARGET = 1.5
"""Wall seconds of a trial over those of its steps."""

TRIALS = {
    "mlp, one rank": ("model=mlp", "mesh=single"),
    "gpt_nano, one rank": ("model=gpt_nano", "mesh=single"),
    "gpt_nano, shard2": ("model=gpt_nano", "mesh=shard2"),
}
_COMMON = ("ac=full", "mesh.device=cpu", "tracker=none")
_STEPS = ("steps before the meters", "steps under the meters", "steps for parity", "warm-up and timed steps")
_RANK = "parts.json"
_PROGRAM = (  # as the command does: what waits is imported when it is read
    "import sys; from harness import deferred; deferred.install(); "
    "from bench.overhead import trial_cost; trial_cost.main(sys.argv[1:])"
)
_TORCH_ALONE = "import torch; torch.optim.SGD([torch.zeros(1)])"

Parts = dict[str, dict[str, float]]
"""Wall and CPU seconds by part."""


class Stopwatch:
    """Wall and CPU seconds of this process by part; a part inside another is not counted in that one."""

    def __init__(self, part: str, started_s: float | None = None, cpu_s: float | None = None) -> None:
        self.parts: Parts = {}
        self._names = [part]
        self._last = {
            "wall_s": time.monotonic() if started_s is None else started_s,
            "cpu_s": time.process_time() if cpu_s is None else cpu_s,
        }

    def count(self) -> None:
        """Count what has passed since the last call for the part that is entered."""
        now = {"wall_s": time.monotonic(), "cpu_s": time.process_time()}
        part = self.parts.setdefault(self._names[-1], dict.fromkeys(now, 0.0))
        for unit, value in now.items():
            part[unit] += value - self._last[unit]
        self._last = now

    @contextmanager
    def inside(self, part: str) -> Iterator[None]:
        """Count the block for `part`."""
        self.count()
        self._names.append(part)
        try:
            yield
        finally:
            self.count()
            self._names.pop()

    def switch(self, part: str) -> None:
        """Count what follows, outside of every block, for `part`."""
        self.count()
        self._names[0] = part

    def watched(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return `function`, whose calls count for `part`."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.inside(part):
                return function(*args, **kwargs)

        return timed


def main(words: Sequence[str]) -> int:
    """Measure, print, write; times are never a reason to fail."""
    options = _options(words)
    if options.started_s is not None:
        _command(options)
        return 0
    protocol = {"repeats": options.repeats, "load_average_before": os.getloadavg()[0]}
    found = {
        f"{name}, {length}": _best(words, length, options.repeats)
        for name, words in TRIALS.items()
        for length in options.protocols.split(",")
    }
    torch_s = min(_torch_alone_s() for _ in range(options.repeats))
    publish(
        _table(found, torch_s), options.out, protocol=protocol, results={"torch_s": torch_s, "trials": found}
    )
    return 0


def rank(plan: Any, context: Any) -> dict[str, Any]:
    """Run a trial in this rank and leave its parts beside its report; the entry of the ranks."""
    watch = Stopwatch("rest of the rank")
    with ExitStack() as stack:
        for owner, name, part in watched_functions():
            stack.enter_context(replaced(owner, name, watch.watched(getattr(owner, name), part)))
        result: dict[str, Any] = importlib.import_module("harness.trial.run").run(plan, context)
    watch.count()
    if context.rank == 0:
        (context.trial_dir / _RANK).write_text(json.dumps(watch.parts), "utf-8")
    return result


def watched_functions() -> list[tuple[Any, str, str]]:
    """Return the functions whose calls count for a part of a rank: module, name and part."""
    trial, build, proof, steps = (
        importlib.import_module(f"harness.trial.{name}") for name in ("run", "build", "proof", "steps")
    )
    return [
        (steps, "train", _STEPS[0]),  # as `warm_up` reads it
        (trial, "train", _STEPS[3]),
        (trial, "assemble", "build"),
        (trial, "device_mesh", "device mesh"),
        (build, "plan_sharding", "plan"),
        (trial, "instrument", _STEPS[1]),
        (trial, "allocator_truth", _STEPS[1]),
        (trial, "install", "allocator"),
        (trial, "peak_flops", "peak rate"),
        (trial, "describe", "environment"),
        (proof, "compare_steps", _STEPS[2]),
        (gc, "collect", "garbage collection"),
        (gc, "freeze", "garbage collection"),
    ]


def _options(words: Sequence[str]) -> argparse.Namespace:
    made = parser(__doc__, "trial_cost", "overhead")
    made.add_argument("--protocols", default="smoke,standard", help="separated by commas")
    made.add_argument("--repeats", type=int, default=3, help="of each trial; the quickest is shown")
    made.add_argument("--started-s", type=float, help=argparse.SUPPRESS)
    made.add_argument("--words", help=argparse.SUPPRESS)
    return made.parse_args(words)


def _best(words: tuple[str, ...], protocol: str, repeats: int) -> Parts:
    return min(
        (trial([*words, *_COMMON, f"protocol={protocol}"]) for _ in range(repeats)),
        key=lambda parts: sum(part["wall_s"] for part in parts.values()),
    )


def _torch_alone_s() -> float:
    """Return the wall time of a program that makes an optimizer and does nothing else."""
    started_s = time.monotonic()
    subprocess.run([sys.executable, "-c", _TORCH_ALONE], check=True)
    return time.monotonic() - started_s


def trial(words: list[str]) -> Parts:
    """Run one command and return its parts, in the order of time; a trial that fails is an error."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "driver.json")
        words = [*words, f"outputs_dir={folder}", "name=cost"]
        started_s = time.monotonic()
        program = [
            sys.executable,
            "-c",
            _PROGRAM,
            f"--started-s={started_s}",
            f"--words={json.dumps(words)}",
        ]
        command = subprocess.run([*program, f"--out={out}"], capture_output=True, text=True, check=False)
        if command.returncode != 0:
            raise RuntimeError(f"acbench {' '.join(words)}: {command.stdout}{command.stderr}")
        ended_s = time.monotonic()
        driver = json.loads(out.read_text("utf-8"))
        (rank_file,) = Path(folder, "cost").glob(f"*/{_RANK}")
        ranks: Parts = json.loads(rank_file.read_text("utf-8"))
    parts: Parts = driver["parts"]
    within = {unit: sum(part[unit] for part in ranks.values()) for unit in ("wall_s", "cpu_s")}
    parts["start and end of ranks"] = {
        "wall_s": parts.pop("ranks")["wall_s"] - within["wall_s"],
        "cpu_s": 0.0,
    }
    parts["exit"] = {"wall_s": ended_s - driver["ended_s"], "cpu_s": 0.0}
    return parts | ranks


def _command(options: argparse.Namespace) -> None:
    """Be `acbench` in this process and write its parts to `options.out`."""
    watch = Stopwatch("start of the driver", options.started_s, 0.0)
    cli = importlib.import_module("harness.command_line.cli")  # here, because its import is measured
    agent, forkserver = (importlib.import_module(f"harness.ranks.{name}") for name in ("agent", "forkserver"))

    watch.switch("configuration, checks and plan")
    run, await_ready = agent.Agent.run, forkserver.ForkServer.await_ready

    def run_ranks(self: Any, job: Any, *args: Any, **kwargs: Any) -> Any:
        watch.switch("record and table")
        with watch.inside("ranks"):
            return run(
                self, dataclasses.replace(job, entry="bench.overhead.trial_cost:rank"), *args, **kwargs
            )

    wait_for_server = watch.watched(await_ready, "wait for the fork server")
    status = 0
    with (
        replaced(agent.Agent, "run", run_ranks),
        replaced(forkserver.ForkServer, "await_ready", wait_for_server),
        replaced(cli, "PRELOAD", (*cli.PRELOAD, "bench.overhead.trial_cost")),
        replaced(sys, "argv", ["acbench", *json.loads(options.words)]),
    ):
        try:
            cli.main()
        except SystemExit as error:
            status = int(str(error.code or 0))
    watch.count()
    options.out.write_text(json.dumps({"parts": watch.parts, "ended_s": time.monotonic()}), "utf-8")
    sys.exit(status)


def _table(found: Mapping[str, Parts], torch_s: float) -> Table:
    steps_s = [_wall_s({part: parts[part] for part in _STEPS}) for parts in found.values()]
    walls_s = [_wall_s(parts) for parts in found.values()]
    title = "Seconds of a trial, wall (CPU of the driver or of rank 0)"
    table = Table(title=title, caption=f"target: {TARGET:g} times the steps")
    table.add_column("part")
    for name in found:
        table.add_column(name, justify="right")
    for part in dict.fromkeys(part for parts in found.values() for part in parts):
        table.add_row(part, *(_cell(parts, part) for parts in found.values()))
    table.add_section()
    rows = {
        "wall": walls_s,
        "wall / steps": [wall_s / steps for wall_s, steps in zip(walls_s, steps_s, strict=True)],
        f"(wall - {torch_s:.2f} s of torch alone) / steps": [
            (wall_s - torch_s) / steps for wall_s, steps in zip(walls_s, steps_s, strict=True)
        ],
    }
    for name, values in rows.items():
        table.add_row(name, *(f"{value:.2f}" for value in values))
    return table


def _cell(parts: Parts, name: str) -> str:
    part = parts.get(name, {"wall_s": 0.0, "cpu_s": 0.0})
    return f"{part['wall_s']:.2f} ({part['cpu_s']:.2f})"


def _wall_s(parts: Parts) -> float:
    return sum(part["wall_s"] for part in parts.values())
