"""Run a sweep: plan it, give its trials to the launcher, collect their records."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from harness.errors import ConfigError, PredictedOomError
from harness.launchers.base import Launcher, Sweep
from harness.launchers.interrupts import Interrupts
from harness.launchers.local import Local
from harness.launchers.progress import SweepProgress
from harness.launchers.run_task import PRELOAD, now
from harness.launchers.task import Point
from harness.measure.environment import describe, environment_id
from harness.ranks.agent import Agent
from harness.records.record import Identity, Record, predicted_oom, refused
from harness.records.store import Store
from harness.report.wandb.publisher import Tracker, publish
from harness.sweep.plan import plan_sweep


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Options of the command that change no trial: where records are kept, and what the exit code means.

    Fields:
        name: the sweep; its folder below `outputs_dir`.
        rerun: also run points that have a finished record.
        strict: also exit with 1 for a verdict other than `neutral`, a status other than `ok`, or a point that
            has no record yet.
        skip_predicted_oom: do not run points that are predicted not to fit `hardware`.
        judge: run for each point of a sweep the plan of `ac=budget` at the peak that it measured.
    """

    name: str = "default"
    outputs_dir: str = "outputs"
    rerun: bool = False
    strict: bool = False
    skip_predicted_oom: bool = False
    judge: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The outcome of a sweep.

    Fields:
        records: records of all points that have one, in the order of the points.
        missing: number of distinct points without a record: still running, or not reached before a stop.
        is_stopped: whether the user or a signal stopped the sweep.
    """

    records: Sequence[Record]
    missing: int
    is_stopped: bool

    def followed_by(self, other: Result) -> Result:
        """Return the outcome of both."""
        return Result(
            records=[*self.records, *other.records],
            missing=self.missing + other.missing,
            is_stopped=self.is_stopped or other.is_stopped,
        )


def run_sweep(
    points: Sequence[Point],
    run: Run,
    tracker: Tracker,
    launcher: Launcher | None = None,
    agent: Agent | None = None,
) -> Result:
    """Run the points that have no finished record yet.

    A trial that fails becomes a record and the next one starts. The first Ctrl-C of a sweep lets the running
    trials end, the second raises `KeyboardInterrupt`; trials without a record run again next time.

    Args:
        tracker: tracker to which the records are published at the end.
        launcher: runs the trials; `None`: on this machine, one after the other.
        agent: agent for trials of this process, closed after them; `None`: a new one.

    Raises:
        ConfigError: the sweep's folder cannot be written or locked, or the launcher cannot work; nothing has
            run.
    """
    store = Store(Path(run.outputs_dir) / run.name)
    store.require_writable()
    launcher = Local() if launcher is None else launcher
    with Interrupts(is_patient=len(points) > 1) as interrupts, SweepProgress() as progress:
        sweep = Sweep(
            store=store,
            name=run.name,
            rerun=run.rerun,
            progress=progress,
            interrupts=interrupts,
            agent=agent or Agent(PRELOAD),
        )
        with _usable(store), store.planning():
            plan = plan_sweep(points, launcher, store, name=run.name, rerun=run.rerun)
            sys.stderr.write(f"{plan}\n")
            progress.start(len(plan.refused) + len(plan.to_run) + len(plan.in_flight))
            found = dict(plan.done)
            for point, label in plan.refused:
                found[point.trial_id] = _refuse(sweep, point, label)
            records = launcher.dispatch(sweep, plan.to_run, plan.in_flight)
        for record in records:
            found[record.trial_id] = record
    published = publish(store, tracker)
    if published is not None:
        sys.stderr.write(f"{published}\n")
    distinct = {point.trial_id for point in points}
    return Result(
        records=[found[point.trial_id] for point in points if point.trial_id in found],
        missing=len(distinct - found.keys()),
        is_stopped=interrupts.stop_requested,
    )


def exit_code(result: Result, *, strict: bool) -> int:
    """Return 0 when every record is a result and nothing was stopped.

    With `strict`, when every point has a record that is `ok` and `neutral`.
    """
    records = result.records
    if strict:
        is_good = all(record.status == "ok" and record.verdict == "neutral" for record in records)
        return int(not is_good or result.missing > 0)
    is_bad = any(record.status in {"failed", "timeout", "lost"} for record in records)
    return int(is_bad or result.is_stopped)


@contextmanager
def _usable(store: Store) -> Iterator[None]:
    """Refuse a sweep whose own folder cannot be used: it is full, or its lock is another user's alone."""
    try:
        yield
    except OSError as error:
        problem = f"cannot use {str(store.root)!r}: {error}"
        raise ConfigError("outputs_dir", problem) from error


def _refuse(sweep: Sweep, point: Point, label: str) -> Record:
    environment = describe("cpu")
    address = environment_id(environment)
    found = None if sweep.rerun else sweep.store.finished(point.trial_id, address)
    if found is not None:
        sweep.progress.point_finished(label, f"{found.status}, done before", found.verdict)
        return found
    identity = Identity(
        trial_id=point.trial_id, environment_id=address, name=sweep.name, experiment=point.resolved
    )
    kind = predicted_oom if isinstance(point.refusal, PredictedOomError) else refused
    record = kind(identity, str(point.refusal), at=now(), environment=environment)
    with suppress(OSError):  # its folder cannot be used; it would not have been for anything else
        trial_dir = sweep.store.prepare(point.trial_id)
        sweep.store.write_file(trial_dir / "experiment.yaml", point.yaml)
        sweep.store.write(record)
    sweep.progress.point_finished(label, record.status, record.verdict)
    return record
