"""One trial, from its task to its record on disk; whoever runs it holds the trial's lock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.experiment.devices import device_type
from harness.experiment.experiment import Experiment
from harness.launchers.foresight import foreseen
from harness.launchers.resource_shape import Resources
from harness.launchers.task import Task
from harness.measure.environment import describe, environment_id
from harness.ranks.culprit import Outcome
from harness.ranks.rank_report import PHASES, read_kept, read_reports
from harness.ranks.start import RankJob
from harness.records.claims import read_attempt
from harness.records.files import make_folder
from harness.records.record import Ending, Failure, Identity, Record, build, refused
from harness.records.store import Store
from harness.trial.links import Link, chain
from harness.trial.trial_plan import BASELINES, ENTRY, TrialPlan

PRELOAD = (
    ENTRY.partition(":")[0],
    "harness.models:families",
    "harness.predict.prediction",
    "scipy.optimize",
    "scipy.sparse",
    "scipy.sparse.csgraph",
    "torch._subclasses.schema_check_mode",  # to leave modes: a failed rank may be unable to open a file
    "harness.measure.environment:note_own_code",
)
"""What a trial's ranks and its prediction need; SciPy solves for its bound and plans."""

Supervise = Callable[[RankJob], Outcome]
Job = Mapping[str, Any]
"""Submission, lane and scheduler's job that ran a trial; `environment.job` of its record."""

_NOTES = {
    "paired": None,
    "sequential": (
        "variant and twin did not fit side by side: they ran one after the other, "
        "and step times are not paired"
    ),
    "none": "the twin did not fit",
}


def run_task(
    task: Task,
    supervise: Supervise,
    *,
    call: Callable[..., Any],
    store: Store,
    name: str,
    resources: Resources,
    job: Job,
) -> Record:
    """Run a trial and return its record, which is on disk by then unless it says that this is not possible.

    Args:
        supervise: runs ranks to their end; called again with less of the twin where that did not fit.
        call: calls a function where torch is imported, for what is predicted of the trial before it runs.
        resources: what the trial may use of every node.
        job: value of `environment.job`.
    """
    try:
        trial_dir = store.prepare(task.trial_id)
        store.write_file(trial_dir / "experiment.yaml", task.yaml)
        predicted = foreseen(task.experiment, task.hardware, call, folder=trial_dir.parent)
        started_at = now()
        environment = _environment(task, job)
        outcome, mode = _attempts(task, supervise, trial_dir, resources)
        if outcome.status == "timeout":  # its ranks have measured something until then
            outcome = replace(outcome, results=read_kept(trial_dir, task.experiment.mesh.world_size))
        record = build(
            _identity(task, name, environment),
            Ending(
                status=outcome.status,
                error=None if outcome.error is None else asdict(outcome.error),
                started_at=started_at,
                finished_at=now(),
            ),
            outcome.results,
            environment=environment,
            predicted=predicted,
            note=_note(task.experiment, mode, outcome.results),
        )
        # a rank counts the cores of the machine
        record = replace(record, environment=record.environment | {"cpus": resources.core_count})
        store.write(record)
    except (OSError, ValueError) as error:  # its folder cannot be used; a result in it is torn
        return unusable_task(task, error, store=store, name=name, job=job)
    return record


def unusable_task(
    task: Task, error: Exception, *, name: str, store: Store | None = None, job: Job | None = None
) -> Record:
    """Return the record of a trial whose folder cannot be used: full, of another user, no folder.

    Args:
        error: what the operating system said, or what is wrong with a file.
        store: where to write the record if that is possible; `None`: the trial may be somebody else's.
        job: value of `environment.job`.
    """
    at = now()
    failure = Failure(kind=type(error).__name__, message=f"the folder of the trial cannot be used: {error}")
    environment = _environment(task, job)
    ending = Ending(status="failed", error=asdict(failure), started_at=at, finished_at=at)
    record = build(_identity(task, name, environment), ending, environment=environment)
    if store is not None:
        _write(task, record, store)
    return record


def lost_task(
    task: Task, error: Failure, *, store: Store, name: str, job: Job, status: str = "lost"
) -> Record:
    """Write and return the record of a trial that ended while nobody watched it.

    Args:
        error: why it ended; the phase becomes what the slowest rank of a begun trial had reached.
        job: value of `environment.job`, with the submission.
        status: `lost`; `timeout` where its time was over, `oom` where its memory was.
    """
    attempt = read_attempt(store, task.trial_id, job["submission"])
    phase = None if attempt is None else phase_reached(store.trial_dir(task.trial_id))
    at = now()
    ending = Ending(
        status=status,
        error=asdict(error) | {"phase": phase},
        started_at=at if attempt is None else attempt.started_at,
        finished_at=at,
    )
    environment = _environment(task, job)
    is_begun_and_late = status == "timeout" and attempt is not None
    world_size = task.experiment.mesh.world_size
    kept = read_kept(store.trial_dir(task.trial_id), world_size) if is_begun_and_late else ()
    record = build(_identity(task, name, environment), ending, kept, environment=environment)
    _write(task, record, store)
    return record


def refuse_task(task: Task, message: str, *, store: Store, name: str) -> Record:
    """Write and return the record of a trial that the scheduler refuses."""
    with suppress(OSError):
        store.prepare(task.trial_id)
    environment = _environment(task, None)
    record = refused(_identity(task, name, environment), message, at=now(), environment=environment)
    _write(task, record, store)
    return record


def _write(task: Task, record: Record, store: Store) -> None:
    """Write a record that no agent has written, with the experiment next to it, where that is possible."""
    folder = store.trial_dir(task.trial_id)
    with suppress(OSError):  # who asked has the record; the same command runs the trial again
        make_folder(folder, within=store.root)
        store.write_file(folder / "experiment.yaml", task.yaml)
        store.write(record)


def phase_reached(trial_dir: Path) -> str | None:
    """Return the phase that the slowest rank reported; `None` where none reported."""
    reached = [PHASES.index(report.phase) for report in read_reports(trial_dir).values()]
    return PHASES[min(reached)] if reached else None


def rank_job(plan: TrialPlan, trial_dir: Path, resources: Resources) -> RankJob:
    """Return the ranks that a trial needs on node 0."""
    mesh = plan.experiment.mesh
    return RankJob(
        trial_dir=trial_dir,
        entry=ENTRY,
        payload=plan,
        ranks=mesh.ranks_per_node,
        world_size=mesh.world_size,
        deadline_s=plan.experiment.protocol.deadline_s,
        device=device_type(mesh),
        threads_per_rank=resources.threads_of_rank(mesh.ranks_per_node),
        cores=resources.cores,
    )


def _note(experiment: Experiment, baseline: str, results: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the note of a trial; nothing of tolerances where ranks have measured nothing."""
    levels = {parity["level"] for result in results if (parity := result.get("parity")) is not None}
    return note_of(experiment, baseline, levels) if results else _NOTES[baseline]


def note_of(
    experiment: Experiment, baseline: str, levels: AbstractSet[str] = frozenset({"tolerance"})
) -> str | None:
    """Return what a reader of the record should know: how the twin ran, and why numbers may differ.

    Args:
        levels: levels at which ranks compared: a plan of chunks that has none is bitwise equal.
    """
    first, *others = chain(experiment)
    parts = [_NOTES[baseline]]
    if levels == {"bitwise"}:
        return parts[0]
    if first.tolerance is not None:
        far = f"within {first.tolerance.bounds} of the twin{first.tolerance.exception}"
        parts.append(f"{far}: {first.tolerance.reason}")
    if baseline != "none":
        parts += [
            f"{link.compared} {_how_far(link)}"
            for link in others
            # what else is exact goes without saying; the dense model is the twin's, and its numbers stay
            if (link.tolerance is not None or first.tolerance is not None) and not link.is_dense
        ]
    return "; ".join(part for part in parts if part) or None


def _how_far(link: Link) -> str:
    if link.tolerance is None:
        return "bit for bit"
    return f"within {link.tolerance.bounds}{link.tolerance.exception}"


def now() -> str:
    """Return the time as records state it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _attempts(task: Task, supervise: Supervise, trial_dir: Path, resources: Resources) -> tuple[Outcome, str]:
    """Run the trial; where the twin does not fit with the variant, again with less of it."""
    for mode in BASELINES:
        outcome = supervise(
            rank_job(TrialPlan(experiment=task.experiment, baseline=mode), trial_dir, resources)
        )
        if not _twin_did_not_fit(outcome):
            break
    return outcome, mode


def _twin_did_not_fit(outcome: Outcome) -> bool:
    """Say if memory ran out where the twin is alive too; before `parity` a rank holds the variant alone."""
    return (
        outcome.status == "oom" and outcome.error is not None and outcome.error.phase in {"parity", "timing"}
    )


def _identity(task: Task, name: str, environment: Mapping[str, Any]) -> Identity:
    """Return what the trial is; its address says with which sources it ran, wherever the driver was."""
    return Identity(
        trial_id=task.trial_id,
        environment_id=environment_id({**environment, **task.place}),
        name=name,
        experiment=task.resolved,
    )


def _environment(task: Task, job: Job | None) -> dict[str, Any]:
    described = describe(device_type(task.experiment.mesh), task.experiment.files)
    return described if job is None else described | {"job": dict(job)}
