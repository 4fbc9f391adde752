"""What planning a sweep costs, from the start of the process to the plan; nothing is run.

Two commands over the same points, each in a process of its own: the first finds nothing done, the second a
record of every point. The records are one real trial's, under the address of each point. Hydra's own
composition of some of the points is timed between the parts of the first command, and is in none of them.

    python -m bench.overhead --part planning --points 1000
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

from hydra.core.config_loader import ConfigLoader
from hydra.core.plugins import Plugins
from omegaconf import DictConfig
from rich.table import Table

from bench.output import parser, publish
from bench.table import Column, table_of
from bench.trials import experiments, records
from harness.command_line import cli
from harness.launchers.base import Launcher
from harness.launchers.task import Point
from harness.ranks.agent import Agent
from harness.records.record import Record, validate
from harness.records.store import Store
from harness.report.wandb.publisher import Tracker
from harness.sweep.launch import Run
from harness.sweep.plan import SweepPlan, plan_sweep

TARGET_S = 10
"""Seconds that a plan of 1,000 points may take on two cores."""

_AC = ("none", "full", "selective_layer", "selective_op")
_MESHES = ("single", "shard2", "ddp2", "tp2", "hsdp2x2")
_SAMPLE = 20
_TRIAL = ("mesh.device=cpu", "protocol=smoke", "protocol.timed_pairs=0")


class _PlannedError(BaseException):
    """There is a plan; nothing between here and the command takes it for an error of its own."""


class Clock:
    """Wall and CPU seconds of this process, by part."""

    def __init__(self, started_s: float) -> None:
        self.parts: dict[str, dict[str, float]] = {}
        self._last = {"wall_s": started_s, "cpu_s": 0.0}

    def end(self, part: str) -> None:
        """Count what has passed since the last call for `part`."""
        now = self._now()
        self.parts[part] = {unit: now[unit] - self._last[unit] for unit in now}
        self._last = now

    def without(self, work: Callable[[], object]) -> float:
        """Do `work` and return its CPU seconds, which no part counts."""
        before = self._now()
        work()
        after = self._now()
        self._last = {unit: self._last[unit] + after[unit] - before[unit] for unit in after}
        return after["cpu_s"] - before["cpu_s"]

    @staticmethod
    def _now() -> dict[str, float]:
        return {"wall_s": time.monotonic(), "cpu_s": time.process_time()}


def main(words: Sequence[str]) -> int:
    """Measure, print, write; times are never a reason to fail."""
    options = _options(words)
    if options.started_s is not None:
        _command(options)
        return 0
    load_average = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record = folder / "measured.json"
        record.write_text(json.dumps(_measured(folder).to_dict()), "utf-8")
        commands = {
            "nothing done": _run(folder, options.points, record),
            "everything done": _run(folder, options.points, None),
        }
    protocol = {
        "points": options.points,
        "composed_by_hydra_alone": _SAMPLE,
        "load_average_before": load_average,
    }
    publish(_table(commands), options.out, protocol=protocol, results=commands)
    return 0


def _options(words: Sequence[str]) -> argparse.Namespace:
    made = parser(__doc__, "planning", "overhead")
    made.add_argument("--points", type=int, default=1000, help="a multiple of 20")
    made.add_argument("--started-s", type=float, help=argparse.SUPPRESS)
    made.add_argument("--outputs-dir", help=argparse.SUPPRESS)
    made.add_argument("--fill-with", type=Path, help=argparse.SUPPRESS)
    return made.parse_args(words)


def _measured(folder: Path) -> Record:
    """Return the record of one trial."""
    with Agent(preload=("harness.trial.run",)) as agent:
        (record,) = records(agent, experiments([(*_TRIAL, "ac=full")]), folder)
    return record


def _run(folder: Path, points: int, record: Path | None) -> dict[str, Any]:
    """Return what a command in a fresh process measured.

    Args:
        folder: for the sweep.
        points: of the sweep.
        record: afterwards the record of every point; `None` leaves the sweep as it is.
    """
    result = folder / "result.json"
    words = [f"--points={points}", f"--outputs-dir={folder}", f"--out={result}"]
    words += [] if record is None else [f"--fill-with={record}"]
    words = ["--part=planning", f"--started-s={time.monotonic()}", *words]
    program = [sys.executable, "-m", "bench.overhead", *words]
    subprocess.run(program, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    found: dict[str, Any] = json.loads(result.read_text("utf-8"))
    return found


def _command(options: argparse.Namespace) -> None:
    """Plan in this process and write what it took to `options.out`."""
    clock, found = Clock(options.started_s), dict[str, Any]()
    clock.end("imports")
    Plugins.instance()  # executes the module of the launcher anew, so that it can be watched only afterwards
    launcher = importlib.import_module("hydra_plugins.acbench.launcher")
    compose_all = launcher.compose_all

    def composing(loader: ConfigLoader, master: DictConfig, points: Sequence[list[str]]) -> list[DictConfig]:
        clock.end("Hydra")
        configs: list[DictConfig] = compose_all(loader, master, points)
        clock.end("compose")
        sample = points[:: max(1, len(points) // _SAMPLE)]
        hydra_s = clock.without(lambda: [loader.load_sweep_config(master, each) for each in sample])
        found["hydra_composition_cpu_s"] = hydra_s / len(sample)
        found["composition_cpu_s"] = clock.parts["compose"]["cpu_s"] / len(points)
        return configs

    def planning(points: Sequence[Point], run: Run, _tracker: Tracker, launcher: Launcher) -> None:
        clock.end("materialise and check")
        store = Store(Path(run.outputs_dir) / run.name)
        store.require_writable()
        plan = plan_sweep(points, launcher, store, name=run.name, rerun=run.rerun)
        found["plan"] = str(plan)
        clock.end("deduplicate and look up")
        if options.fill_with is not None:
            _fill(store, plan, validate(json.loads(options.fill_with.read_text("utf-8"))))
        raise _PlannedError

    words = ["acbench", "-m", *_sweep(options.points), f"outputs_dir={options.outputs_dir}"]
    with (
        mock.patch.object(launcher, "compose_all", composing),
        mock.patch.object(cli, "run_sweep", planning),
        mock.patch.object(sys, "argv", words),
        suppress(_PlannedError),
    ):
        cli.main()
    options.out.write_text(json.dumps({**found, "parts": clock.parts}), "utf-8")


def _sweep(points: int) -> list[str]:
    seeds = points // (len(_AC) * len(_MESHES))
    return [*_TRIAL, f"seed=range(0,{seeds})", f"ac={','.join(_AC)}", f"mesh={','.join(_MESHES)}"]


def _fill(store: Store, plan: SweepPlan, measured: Record) -> None:
    for task in plan.to_run:
        store.write(
            dataclasses.replace(
                measured,
                trial_id=task.trial_id,
                environment_id=task.environment_id,
                experiment=task.resolved,
            )
        )


def _table(commands: Mapping[str, Mapping[str, Any]]) -> Table:
    first = commands["nothing done"]
    hydra_s, ours_s = first["hydra_composition_cpu_s"], first["composition_cpu_s"]
    title = (
        f"Planning, seconds; composed by Hydra alone a point takes {hydra_s * 1e3:.0f} ms of CPU, "
        f"{hydra_s / ours_s:.0f} times what it takes here"
    )
    parts = {part: [part] for part in first["parts"]} | {"total": list(first["parts"])}
    columns: dict[str, Column] = {"part": str}
    for name, command in commands.items():
        columns[f"{name}: wall"] = _seconds(command, parts, "wall_s")
        columns[f"{name}: CPU"] = _seconds(command, parts, "cpu_s")
    caption = f"target: {TARGET_S} s for 1,000 points; {first['plan']}"
    return table_of(parts, columns, title=title, caption=caption)


def _seconds(command: Mapping[str, Any], parts: Mapping[str, Sequence[str]], unit: str) -> Column:
    """Return the column of what the parts of a command took, several together where a row has several."""
    return lambda row: f"{sum(command['parts'][part][unit] for part in parts[row]):.2f}"
