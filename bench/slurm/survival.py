"""Drivers killed with SIGKILL at random moments: what finished stays, and nothing runs twice.

Each sweep has points of two shapes. Its command is killed at random moments, drawn over the time that an
undisturbed one takes and counted from its start or, as often, from the line that says its plan, so that a
machine which became slower does not leave all of them to planning. It is started again until it ends by
itself. Every start
of a trial leaves a trace in a file. On this machine, a trial that was running dies with its driver and starts
again; as a job of Slurm it lives on, and starts once.

    python -m bench.slurm --part survival --kills 20
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from bench.output import parser, publish
from bench.slurm.sweeps import Sweep, plan_line, private_slurm
from bench.table import table_of
from harness.records.store import Store

LAUNCHERS = ("local", "slurm")
_OPTIONS = {"local": (), "slurm": ("hydra.launcher.poll_s=0.2",)}
_SIGKILL_STATUS = -9


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """One driver that was killed.

    Fields:
        launcher, sweep: of its command.
        moment_s: after its start, or after its plan.
        is_planned: whether it was counted from the plan.
        stage: what it had said last.
        finished: points with a record when it was dead.
    """

    launcher: str
    sweep: str
    moment_s: float
    is_planned: bool
    stage: str
    finished: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Survivor:
    """A sweep whose drivers were killed, after its last command.

    Fields:
        launcher, sweep: of its command.
        points: that have a record of status `ok`, of how many.
        lost: finished points whose record is gone or another one.
        twice: finished points that started again, and under Slurm points that started more than once.
        again: what the plan says when the command is repeated once more.
    """

    launcher: str
    sweep: str
    points: tuple[int, int]
    lost: int
    twice: int
    again: str

    @property
    def is_right(self) -> bool:
        """Whether every point has its record, none was lost and none ran twice."""
        return (
            self.points[0] == self.points[1]
            and not self.lost
            and not self.twice
            and " 0 to run" in self.again
        )


def main(words: Sequence[str]) -> int:
    """Kill, repeat, print, write; return 1 when a point was lost or ran twice."""
    made = parser(__doc__, "survival", "slurm")
    made.add_argument("--kills", type=int, default=20, help="of each launcher")
    made.add_argument("--kills-a-sweep", type=int, default=2)
    made.add_argument("--points", type=int, default=3, help="of each shape, >= 1")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=LAUNCHERS)
    options = made.parse_args(words)
    kills: list[Kill] = []
    survivors: list[Survivor] = []
    spans_s: dict[str, float] = {}
    for launcher in options.launchers:
        draw = random.Random(f"{options.seed} {launcher}")  # noqa: S311 (no secret)
        with _where(launcher), tempfile.TemporaryDirectory() as folder:
            spans_s[launcher] = _undisturbed_s(_sweep(launcher, folder, "undisturbed", options.points))
            while sum(kill.launcher == launcher for kill in kills) < options.kills:
                sweep = _sweep(launcher, folder, f"killed{len(survivors)}", options.points)
                moments = [
                    (draw.random() < 0.5, draw.uniform(0, spans_s[launcher]))
                    for _ in range(options.kills_a_sweep)
                ]
                found, survivor = _survive(launcher, sweep, moments, 2 * options.points)
                kills += found
                survivors.append(survivor)
                print(*found, survivor, sep="\n", file=sys.stderr)
    protocol = {
        "seed": options.seed,
        "points_a_sweep": 2 * options.points,
        "shapes": ["1x1", "1x2"],
        "undisturbed_s": spans_s,
    }
    results = {
        "kills": [asdict(kill) for kill in kills],
        "sweeps": [asdict(survivor) for survivor in survivors],
    }
    publish(_table(kills, survivors), options.out, protocol=protocol, results=results)
    return int(not all(survivor.is_right for survivor in survivors))


def _where(launcher: str) -> AbstractContextManager[None]:
    return private_slurm() if launcher == "slurm" else nullcontext()


def _sweep(launcher: str, folder: str, name: str, points: int) -> Sweep:
    axes = ("mesh=single,ddp2", f"seed=range(0,{points})")
    overrides = (f"hydra/launcher={launcher}", *axes, *_OPTIONS[launcher])
    return Sweep(outputs_dir=Path(folder), name=name, overrides=overrides)


def _undisturbed_s(sweep: Sweep) -> float:
    started_s = time.monotonic()
    sweep.run()
    return time.monotonic() - started_s


def _survive(
    launcher: str, sweep: Sweep, moments: Sequence[tuple[bool, float]], points: int
) -> tuple[list[Kill], Survivor]:
    """Kill the command of a sweep at each of `moments`, and let the last one end."""
    kills: list[Kill] = []
    finished: dict[str, tuple[str, int]] = {}
    for is_planned, moment_s in moments:
        stage = _kill_at(sweep.start(), moment_s, is_planned=is_planned)
        if stage is None:
            break  # it was faster than the one that nobody disturbed
        finished |= {trial: found for trial, found in _finished(sweep).items() if trial not in finished}
        kills.append(
            Kill(
                launcher=launcher,
                sweep=sweep.name,
                moment_s=moment_s,
                is_planned=is_planned,
                stage=stage,
                finished=len(finished),
            )
        )
    sweep.run()
    again = plan_line(sweep.run())
    ended, starts = _finished(sweep), sweep.starts()
    repeated = {trial for trial, (_, count) in finished.items() if starts[trial] != count}
    if launcher == "slurm":
        repeated |= {trial for trial, count in starts.items() if count > 1}
    records = sweep.records().values()
    return kills, Survivor(
        launcher=launcher,
        sweep=sweep.name,
        points=(sum(record["status"] == "ok" for record in records), points),
        lost=sum(ended.get(trial, ("", 0))[0] != digest for trial, (digest, _) in finished.items()),
        twice=len(repeated),
        again=again,
    )


def _kill_at(driver: subprocess.Popen[str], moment_s: float, *, is_planned: bool) -> str | None:
    """Kill a command after `moment_s`; return what it had said last, `None` when it was over before."""
    assert driver.stderr is not None
    last = next((line for line in driver.stderr if " to run, " in line), "") if is_planned else ""
    time.sleep(moment_s)
    driver.kill()
    _, said = driver.communicate()
    if driver.returncode != _SIGKILL_STATUS:
        return None
    lines = [last, *said.splitlines()]
    return lines[-1].strip() or "nothing yet"


def _finished(sweep: Sweep) -> dict[str, tuple[str, int]]:
    """Return digest of the record and number of starts of every trial that has a record."""
    store = Store(sweep.root)
    digests = {trial: store.digest(trial) for trial in sweep.records()}
    starts = sweep.starts()  # afterwards: a second start that began meanwhile shall not be overlooked
    return {trial: (digest, starts[trial]) for trial, digest in digests.items()}


def _table(kills: Sequence[Kill], survivors: Sequence[Survivor]) -> Table:
    right = sum(survivor.is_right for survivor in survivors)
    lost = sum(survivor.lost for survivor in survivors)
    twice = sum(survivor.twice for survivor in survivors)
    return table_of(
        kills,
        {
            "launcher": "launcher",
            "sweep": "sweep",
            "last word": "stage",
            "killed after s": "moment_s:.2f",
            "finished by then": "finished",
        },
        title=f"{len(kills)} drivers killed: {lost} finished points lost, {twice} run twice",
        caption=f"{right} of {len(survivors)} sweeps ended with every record",
    )
