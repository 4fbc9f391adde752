"""Sweeps of faults by the real command line; those of Slurm run on a private cluster of two nodes."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.records.store import RECORD
from tests.matrix.faults.acts import ACTS, await_idle, private_slurm, underway
from tests.matrix.faults.cases import CASES, GROUPS, LAST_RANK, LAUNCHERS, ON_SLURM, SHAPES, Case, is_refused

ROOT = Path(__file__).parents[3]
_MODELS = "tests.matrix.faults.models"

_HANGING_S = 300.0
_FREED_S = 180.0
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
        is_freed: whether the scheduler's jobs of the sweep ended within three minutes, by themselves.
    """

    case: str
    launcher: str
    shape: str
    found: tuple[Any, ...]
    expected: tuple[Any, ...]
    message: str | None
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
        factories = sorted({f"{_MODELS}:{case.factory}" for case in self.cases})
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
            self._act(driver, repairs)
            self._await(driver)
        is_freed = self.launcher not in ON_SLURM or await_idle(_FREED_S)
        return [
            replace(self._cell(case, shape), is_freed=is_freed)
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

    def _act(self, driver: subprocess.Popen[bytes], repairs: contextlib.ExitStack) -> None:
        """Do what the group does to its trials as soon as all of them stand in their fault."""
        act = ACTS.get(self.group)
        if act is None:
            return
        sizes = [LAST_RANK[shape] + 1 for shape in self.shapes if not is_refused(self.launcher, shape)]
        while len(found := underway(self.root, sizes)) < len(sizes):
            if driver.poll() is not None:
                return
            time.sleep(_POLL_S)
        repairs.enter_context(act(found))

    def _cell(self, case: Case, shape: str) -> Cell:
        records = [json.loads(path.read_text("utf-8")) for path in self.root.glob(f"*/{RECORD}")]
        record = next((record for record in records if _is_of(record, case, shape)), None)
        error = (record and record["error"]) or {}
        found = () if record is None else (record["status"], *map(error.get, ("kind", "rank", "phase")))
        return Cell(
            case=case.name,
            launcher=self.launcher,
            shape=shape,
            found=found,
            expected=case.expects(self.launcher, shape),
            message=error.get("message"),
        )


def cells_of(launcher: str, group: str, shapes: Sequence[str]) -> list[Cell]:
    """Run the cases of a group on a launcher in one sweep and return its cells; each shape has some."""
    cases = [case for case in CASES if case.group == group and launcher in case.launchers]
    with (
        tempfile.TemporaryDirectory(prefix="acb-faults-") as folder,
        # a new one for each: Slurm may take devices of a node that died for busy for ever
        private_slurm() if launcher in ON_SLURM else contextlib.nullcontext(),
    ):
        sweep = _Sweep(folder=Path(folder), launcher=launcher, group=group, cases=cases, shapes=shapes)
        cells = sweep.run()
        if not all(cell.found for cell in cells):
            sys.stderr.write((sweep.folder / "driver.log").read_text("utf-8")[-_SAID_CHARS:])
    return cells


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
    return factory == f"{_MODELS}:{case.factory}" and f"{mesh['nodes']}x{ranks}" == shape
