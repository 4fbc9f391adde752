"""Points in, records out: deduplicate, skip what is finished, run the rest one after the other.

Commands on one sweep share its work: a trial belongs to the command that holds its lock.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.agent import Agent, RankJob
from harness.culprit import Outcome
from harness.environment import describe, environment_id
from harness.experiment import Experiment
from harness.preflight import device_type
from harness.rank_report import RankReport
from harness.record import Ending, Identity, Record, build, refused
from harness.report.labels import point_labels
from harness.report.progress import SweepProgress
from harness.report.publisher import Tracker, publish
from harness.store import Store, write_atomically
from harness.trial import BASELINES, TrialPlan

PRELOAD = ("harness.trial",)
_NOTES = {
    "paired": None,
    "sequential": (
        "variant and twin did not fit side by side: they ran one after the other, "
        "and step times are not paired"
    ),
    "none": "the twin did not fit",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One point of a sweep: an experiment that may run, or the reason why it may not.

    Fields:
        trial_id: content address of `resolved`.
        resolved: the experiment as JSON values.
        experiment: `None` when it was refused.
        refusal: why it was refused.
        yaml: `resolved` for people.
    """

    trial_id: str
    resolved: dict[str, Any]
    experiment: Experiment | None
    refusal: ValueError | None
    yaml: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What does not change a trial: where it is kept and what the exit code means.

    Fields:
        name: the sweep; its folder below `outputs_dir`.
        outputs_dir: root of all results.
        rerun: run points that have a finished record again.
        strict: exit 1 also for a verdict other than `neutral` or a status other than `ok`.
    """

    name: str = "default"
    outputs_dir: str = "outputs"
    rerun: bool = False
    strict: bool = False


def run_sweep(points: Sequence[Point], run: Run, tracker: Tracker) -> list[Record]:
    """Run the points that have no finished record yet; return the record of every point, in order.

    A trial that fails becomes a record and the next one starts. `KeyboardInterrupt` ends the sweep: the trial
    that was running leaves no record and runs again next time.

    Raises:
        ConfigError: the sweep's folder cannot be written; nothing has run.
    """
    store = Store(Path(run.outputs_dir) / run.name)
    store.require_writable()
    distinct = {point.trial_id: point for point in points}
    with Agent(preload=PRELOAD) as agent, SweepProgress() as progress:
        progress.start(len(distinct))
        sweep = _Sweep(run=run, store=store, agent=agent, progress=progress)
        labels = point_labels([point.resolved for point in distinct.values()])
        found = {
            key: sweep.record(point, label)
            for (key, point), label in zip(distinct.items(), labels, strict=True)
        }
    published = publish(store, tracker)
    if published is not None:
        sys.stderr.write(f"{published}\n")
    return [found[point.trial_id] for point in points]


def exit_code(found: Sequence[Record], *, strict: bool) -> int:
    """Return 0 when every record is a result; with `strict`, when every record is `ok` and `neutral`."""
    if strict:
        return int(any(record.status != "ok" or record.verdict != "neutral" for record in found))
    return int(any(record.status in {"failed", "timeout", "lost"} for record in found))


def note_of(experiment: Experiment, baseline: str) -> str | None:
    """Return what a reader of the record should know: how the twin ran, and why numbers may differ."""
    tolerance = experiment.tolerance
    reason = None if tolerance is None else f"within {tolerance.relative:g} of the twin: {tolerance.reason}"
    return "; ".join(part for part in (_NOTES[baseline], reason) if part) or None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sweep:
    """What the points of one sweep share."""

    run: Run
    store: Store
    agent: Agent
    progress: SweepProgress

    def record(self, point: Point, label: str) -> Record:
        """Return the record of `point`: the finished one, or a new one that is on disk by now."""
        with self.store.locked(point.trial_id, on_wait=lambda: self.progress.point_waits(label)):
            return self._record_locked(point, label)

    def _record_locked(self, point: Point, label: str) -> Record:
        environment = _environment(point.experiment)
        address = environment_id(environment)
        finished = self._finished(point, address)
        if finished is not None:
            self.progress.point_finished(label, f"{finished.status}, done before", finished.verdict)
            return finished
        self.progress.point_started(label)
        identity = Identity(
            trial_id=point.trial_id, environment_id=address, name=self.run.name, experiment=point.resolved
        )
        record = self._run(point, identity, environment)
        self.store.write(record)
        self.progress.point_finished(label, record.status, record.verdict)
        return record

    def _finished(self, point: Point, address: str) -> Record | None:
        """Return the record that makes running `point` unnecessary."""
        found = None if self.run.rerun else self.store.finished(point.trial_id, address)
        was_refused = found is not None and found.status == "refused"
        return (
            None if was_refused and point.experiment is not None else found
        )  # what was missing may be there now

    def _run(self, point: Point, identity: Identity, environment: dict[str, Any]) -> Record:
        trial_dir = self.store.prepare(point.trial_id)
        write_atomically(trial_dir / "experiment.yaml", point.yaml)
        started_at = _now()
        if point.experiment is None:
            return refused(identity, str(point.refusal), at=started_at, environment=environment)
        outcome, mode = self._attempts(point.experiment, trial_dir)
        ending = Ending(
            status=outcome.status,
            error=None if outcome.error is None else asdict(outcome.error),
            started_at=started_at,
            finished_at=_now(),
        )
        return build(
            identity, ending, outcome.results, environment=environment, note=note_of(point.experiment, mode)
        )

    def _attempts(self, experiment: Experiment, trial_dir: Path) -> tuple[Outcome, str]:
        """Run the trial; where the twin does not fit beside the variant, again with less of it."""
        watch = self._watch if self.progress.is_live else None
        for mode in BASELINES:
            outcome = self.agent.run(_job(experiment, mode, trial_dir), watch=watch)
            if not _twin_did_not_fit(outcome):
                break
        return outcome, mode

    def _watch(self, reports: Mapping[int, RankReport]) -> None:
        report = reports.get(0)
        if report is not None and report.total is not None:
            self.progress.steps(report.done, report.total)


def _environment(experiment: Experiment | None) -> dict[str, Any]:
    """Return the environment as the driver sees it; a refused point has no device and no files."""
    if experiment is None:
        return describe("cpu")
    return describe(device_type(experiment.mesh), experiment.files)


def _job(experiment: Experiment, baseline: str, trial_dir: Path) -> RankJob:
    mesh = experiment.mesh
    return RankJob(
        trial_dir=trial_dir,
        entry="harness.trial:run",
        payload=TrialPlan(experiment=experiment, baseline=baseline),
        ranks=mesh.ranks_per_node,
        deadline_s=experiment.protocol.deadline_s,
        device=device_type(mesh),
        threads_per_rank=max(1, len(os.sched_getaffinity(0)) // mesh.ranks_per_node),
    )


def _twin_did_not_fit(outcome: Outcome) -> bool:
    """Whether memory ran out where the twin is alive too; before `parity` a rank holds the variant alone."""
    return (
        outcome.status == "oom" and outcome.error is not None and outcome.error.phase in {"parity", "timing"}
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
