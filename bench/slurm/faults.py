"""The fault matrix: every way to fail, on every shape, through every launcher, by the real command line.

A cell is right when the record says the right status, kind of error, rank and phase; beside the count stand
the most seconds from the fault (for a hang, from the deadline) to the record. Slurm's own daemons run on this
machine, a private cluster of two nodes that nothing else can see.

    python -m bench.slurm --part faults --repeat 3 --launchers slurm --faults scancel 'node down'
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.output import parser, publish
from bench.slurm.fault_acts import ACTS, await_idle, private_slurm, run, underway
from bench.slurm.fault_cases import CASES, GROUPS, LAST_RANK, LAUNCHERS, ON_SLURM, SHAPES, Case, is_refused
from bench.slurm.fault_models import BEGUN, FAULT
from bench.table import Column, table_of
from harness.ranks.agent import sigterm_exits
from harness.records.store import RECORD

ROOT = Path(__file__).parents[2]
PATIENCE_S = 5.0
"""How late a record may be after its fault or deadline."""

_HANGING_S = 300.0
_FREED_S = 180.0
_HUNG_S = 60.0  # a driver ends in two seconds after its last record, on a busy machine in twenty
_POLL_S = 0.05
_SAID_CHARS = 2000  # of a driver that has left no record
_TWO_NODES = f"hydra.searchpath=[file://{ROOT}/bench/conf]"  # of mesh=two_nodes
_OVERRIDES = (
    "model=python", "ac=full", "mesh.device=cpu", "tracker=none",
    "data=synthetic", "batch_size=4", "sequence_length=8",
    "protocol=smoke", "protocol.timed_pairs=0", "protocol.parity_steps=1",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One trial of the matrix.

    Fields:
        found, expected: status, kind, rank and phase; `found` is empty where there is no record.
        message: of the error.
        late_s: from the fault to the record; `None` where nothing failed.
        driver_s: from the last record of its sweep to the end of the driver.
        is_freed: whether the scheduler's jobs of the sweep ended within three minutes, by themselves.
    """

    case: str
    launcher: str
    shape: str
    found: tuple[Any, ...]
    expected: tuple[Any, ...]
    message: str | None
    late_s: float | None
    driver_s: float
    is_freed: bool = True

    @property
    def is_right(self) -> bool:
        """Whether the record says what it should, and no job is left."""
        return self.found == self.expected and self.is_freed


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sweep:
    """One command: the cases of one group on one launcher."""

    folder: Path
    launcher: str
    group: str
    cases: Sequence[Case]
    shapes: Sequence[str]

    @property
    def root(self) -> Path:
        return self.folder / "sweep"

    @property
    def command(self) -> list[str]:
        group = GROUPS[self.group]
        factories = sorted({f"bench.slurm.fault_models:{case.factory}" for case in self.cases})
        return [
            sys.executable, "-m", "harness", "-m",
            _TWO_NODES, *_OVERRIDES, *LAUNCHERS[self.launcher], *group.options,
            f"outputs_dir='{self.folder}'", "name=sweep",
            f"hydra/launcher={self.launcher.partition(' ')[0]}",
            f"protocol.deadline_s={group.deadline_s:g}",
            f"model.factory={','.join(factories)}",
            f"mesh={','.join(SHAPES[shape] for shape in self.shapes)}",
        ]  # fmt: skip

    def run(self) -> list[Cell]:
        """Run the command, act on its trials, and return what their records say."""
        with (self.folder / "driver.log").open("wb") as log:
            driver = subprocess.Popen(self.command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        with _ending(driver), contextlib.ExitStack() as repairs:
            acted_s = self._act(driver, repairs)
            self._await(driver)
        ended_s = time.time()
        is_freed = self.launcher not in ON_SLURM or await_idle(_FREED_S)
        return [
            replace(self._cell(case, shape, acted_s, ended_s), is_freed=is_freed)
            for case in self.cases
            for shape in self.shapes
            if case.is_at(self.launcher, shape)
        ]

    def _await(self, driver: subprocess.Popen[bytes]) -> None:
        """Wait for the end of a driver, or until it has written no record for so long that it hangs."""
        seen = None
        while (written := set(self.root.glob(f"*/{RECORD}"))) != seen:
            seen = written
            with contextlib.suppress(subprocess.TimeoutExpired):
                driver.wait(_HANGING_S)
                return

    def _act(self, driver: subprocess.Popen[bytes], repairs: contextlib.ExitStack) -> float | None:
        """Do what the group does to its trials as soon as all of them stand in their fault; return when."""
        act = ACTS.get(self.group)
        if act is None:
            return None
        sizes = [LAST_RANK[shape] + 1 for shape in self.shapes if not is_refused(self.launcher, shape)]
        while len(found := underway(self.root, sizes)) < len(sizes):
            if driver.poll() is not None:
                return None
            time.sleep(_POLL_S)
        acted_s = time.time()
        repairs.enter_context(act(found))
        return acted_s

    def _cell(self, case: Case, shape: str, acted_s: float | None, ended_s: float) -> Cell:
        records = {path: json.loads(path.read_text("utf-8")) for path in self.root.glob(f"*/{RECORD}")}
        last_s = max((path.stat().st_mtime for path in records), default=ended_s)
        path = next((path for path, record in records.items() if _is_of(record, case, shape)), None)
        record = None if path is None else records[path]
        error = (record and record["error"]) or {}
        found = () if record is None else (record["status"], *map(error.get, ("kind", "rank", "phase")))
        return Cell(
            case=case.name,
            launcher=self.launcher,
            shape=shape,
            found=found,
            expected=case.expects(self.launcher, shape),
            message=error.get("message"),
            late_s=None if path is None or not error else self._late_s(path, records[path], acted_s),
            driver_s=ended_s - last_s,
        )

    def _late_s(self, path: Path, record: dict[str, Any], acted_s: float | None) -> float | None:
        """Return the seconds from the fault to the record."""
        written_s = path.stat().st_mtime
        if acted_s is not None and self.group != "time limit":
            since_s: float | None = acted_s
            if self.group == "killed at limit":
                since_s = _job_ended_s(record["environment"]["job"]["id"])
        else:  # a rank notes when it begins, when it fails, and when Slurm's signal reaches it
            since_s = _touched_s(path.with_name(BEGUN if self.group == "hang" else FAULT))
        if since_s is None:
            return None
        return written_s - since_s - (GROUPS[self.group].deadline_s if self.group == "hang" else 0.0)


def main(words: Sequence[str]) -> int:
    """Run the matrix, print it, write the JSON; return 1 if a cell is wrong or a driver hangs."""
    arguments = _arguments(words)
    with sigterm_exits():
        cells = [
            cell
            for _ in range(arguments.repeat)
            for cell in matrix(
                faults=arguments.faults, launchers=arguments.launchers, shapes=arguments.shapes
            )
        ]
    wrong = [cell for cell in cells if not cell.is_right]
    late = [cell for cell in cells if cell.late_s is not None and cell.late_s > PATIENCE_S]
    driver_s = max(cell.driver_s for cell in cells)
    protocol = {
        "overrides": _OVERRIDES,
        "repeat": arguments.repeat,
        "load_average": os.getloadavg(),
    }
    results = {
        "right": len(cells) - len(wrong),
        "cells": len(cells),
        "late": len(late),
        "driver_s": driver_s,
        "runs": [asdict(cell) for cell in cells],
    }
    publish(_table(cells), arguments.out, protocol=protocol, results=results)
    for cell in wrong:
        where = f"{cell.case}, {cell.launcher} {cell.shape}"
        print(f"{where}: got {cell.found}, not {cell.expected}: {cell.message}")
    print(
        f"{results['right']} of {len(cells)} right, {len(late)} later than {PATIENCE_S:g} s; "
        f"the slowest driver ended {driver_s:.1f} s after its last record"
    )
    return int(bool(wrong) or driver_s > _HUNG_S)


def matrix(*, faults: Collection[str], launchers: Sequence[str], shapes: Sequence[str]) -> Iterator[Cell]:
    """Run the chosen part of the matrix once and yield its cells.

    Args:
        faults: names of `CASES`.
        launchers: of `LAUNCHERS`.
        shapes: of `SHAPES`.
    """
    for launcher, group in product(launchers, GROUPS):
        chosen = [case for case in CASES if case.group == group and case.name in faults]
        cases = [case for case in chosen if launcher in case.launchers]
        there = [each for each in shapes if any(case.is_at(launcher, each) for case in cases)]
        if not there:
            continue
        with (
            tempfile.TemporaryDirectory(prefix="acb-faults-") as folder,
            # a new one for each: Slurm may take devices of a node that died for busy for ever
            private_slurm() if launcher in ON_SLURM else contextlib.nullcontext(),
        ):
            sweep = _Sweep(folder=Path(folder), launcher=launcher, group=group, cases=cases, shapes=there)
            cells = sweep.run()
            if not all(cell.found for cell in cells):
                sys.stderr.write((sweep.folder / "driver.log").read_text("utf-8")[-_SAID_CHARS:])
        right = sum(cell.is_right for cell in cells)
        sys.stderr.write(f"{launcher}, {group}: {right} of {len(cells)} right\n")
        yield from cells


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    made = parser(__doc__, "faults", "slurm")
    made.add_argument("--repeat", type=int, default=1)
    names = [case.name for case in CASES]
    for option, choices in (("faults", names), ("launchers", list(LAUNCHERS)), ("shapes", list(SHAPES))):
        made.add_argument(f"--{option}", nargs="+", choices=choices, default=choices, metavar="NAME")
    return made.parse_args(words)


@contextlib.contextmanager
def _ending(driver: subprocess.Popen[bytes]) -> Iterator[None]:
    """End the driver if it is still there; its lanes end with it."""
    try:
        yield
    finally:
        if driver.poll() is None:
            driver.kill()
        driver.wait()


def _is_of(record: dict[str, Any], case: Case, shape: str) -> bool:
    """Whether this is the record of `case` on `shape`."""
    experiment = record["experiment"]
    mesh, factory = experiment["mesh"], experiment["model"]["factory"]
    ranks = mesh["dp_replicate"] * mesh["dp_shard"] // mesh["nodes"]
    return factory == f"bench.slurm.fault_models:{case.factory}" and f"{mesh['nodes']}x{ranks}" == shape


def _touched_s(path: Path) -> float | None:
    return path.stat().st_mtime if path.exists() else None


def _job_ended_s(job: str) -> float:
    """Return when Slurm says that a job ended, to the second."""
    (line, *_) = run("squeue", "--noheader", "--states=all", "--format=%e", f"--jobs={job}").splitlines()
    return datetime.fromisoformat(line.strip()).timestamp()


def _table(cells: Sequence[Cell]) -> Table:
    """Return the matrix: of each cell the runs that are right, and the most seconds from fault to record."""
    places = list(dict.fromkeys((cell.launcher, cell.shape) for cell in cells))
    names = {cell.case for cell in cells}
    runs: dict[tuple[str, str, str], list[Cell]] = defaultdict(list)
    for cell in cells:
        runs[cell.case, cell.launcher, cell.shape].append(cell)
    columns: dict[str, Column] = {
        "fault": "name",
        "status, kind": lambda case: ", ".join(
            each for each in (case.expected.status, case.expected.kind) if each is not None
        ),
    }
    columns |= {"\n".join(place): _outcomes(runs, place) for place in places}
    title = "Faults: runs that are right, seconds from the fault to the record"
    return table_of([case for case in CASES if case.name in names], columns, title=title)


def _outcomes(runs: Mapping[tuple[str, str, str], Sequence[Cell]], place: tuple[str, str]) -> Column:
    return lambda case: _words(case, runs.get((case.name, *place), ()))


def _words(case: Case, runs: Sequence[Cell]) -> str:
    if not runs:
        return case.absence
    late_s = max((cell.late_s for cell in runs if cell.late_s is not None), default=None)
    count = f"{sum(cell.is_right for cell in runs)}/{len(runs)}"
    return count if late_s is None else f"{count} {late_s:.1f}"
