"""Claims on trials: files next to the records, written under the lock of the trial or of the sweep.

A *submission* hands trials to lanes or to jobs of a scheduler. A *claim* says for which submission a trial
is to run. A later command may claim the trial for its own submission, and processes of the earlier one then
skip it. An *attempt* is written before ranks start: if the agent dies, the next lane reports the trial as
lost and does not start it again.
"""

from __future__ import annotations

import fcntl
import json
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from harness.records import files
from harness.records.fields import decode_file, encode
from harness.records.record import Record
from harness.records.store import ATTEMPT, CLAIM, LOCK, SUBMISSIONS, Store

DRIVEN = "driven"
"""The launcher, in their files, of submissions whose driver runs the trials itself."""

_MOST_BYTES = 16 * 2**20  # of one of these files; a submission names each of its trials
_POLL_S = 0.05
_ABOUT_TO_S = 5.0
"""Longest time that a lane takes from the trial's lock to writing its attempt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """The start of a trial.

    Fields:
        lane: lane of the submission that ran it.
        job: id of the scheduler's job, `None` without one.
        restarts: how often the scheduler had started the lane before.
        hosts: where, node 0 first.
        started_at: ISO 8601.
        yielded: whether it was ended from outside (preemption, requeue, Ctrl-C); it may then start again.
    """

    submission: str
    lane: str
    job: str | None
    restarts: int
    hosts: tuple[str, ...]
    started_at: str
    yielded: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Claim:
    """For which submission a trial is to run."""

    submission: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """Why a lane could not use the folder of a trial, where it therefore left no word.

    Fields:
        kind: class of the error.
    """

    kind: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """Trials that were handed to a launcher together.

    Fields:
        id: 12 hexadecimal digits.
        launcher: `slurm`, `slurm_packed`, or `DRIVEN`.
        submitted_at: ISO 8601.
        jobs: id of the scheduler's job by trial_id; empty before submission and without a scheduler.
        is_submitted: whether everything was handed over.
    """

    id: str
    launcher: str
    submitted_at: str
    jobs: dict[str, str] = field(default_factory=dict)
    is_submitted: bool = False

    @property
    def job_name(self) -> str:
        """The name of its jobs, by which they are found if their ids were never written down."""
        return f"acbench-{self.id}"


def new_submission(launcher: str, at: str) -> Submission:
    """Return a submission with an id of its own."""
    return Submission(id=secrets.token_hex(6), launcher=launcher, submitted_at=at)


def folder_of(store: Store, submission: str) -> Path:
    """Return the folder of a submission, which need not exist."""
    return store.root / SUBMISSIONS / submission


def write_submission(store: Store, submission: Submission) -> None:
    """Write what is known of a submission, replacing what was known before."""
    folder = folder_of(store, submission.id)
    files.make_folder(folder, within=store.root)
    store.write_file(folder / "submission.json", json.dumps(encode(submission)))


def read_submission(store: Store, submission: str) -> Submission | None:
    """Return what is known of a submission; `None` where its file is gone or torn."""
    return decode_file(Submission, folder_of(store, submission) / "submission.json", _MOST_BYTES)


@contextmanager
def holding(store: Store, submission: str) -> Iterator[None]:
    """Hold the lock of a submission while its driver lives; the kernel releases it when the driver dies."""
    with files.opened_lock(folder_of(store, submission) / LOCK, within=store.root) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_held(store: Store, submission: str) -> bool:
    """Return whether the driver of a submission lives, as far as this user may know."""
    try:
        file = files.opened_lock(folder_of(store, submission) / LOCK, within=store.root)
    except OSError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def is_abandoned(store: Store, trial_ids: Iterable[str]) -> bool:
    """Return True if no live driver holds these trials.

    Trials submitted to Slurm are never abandoned: only Slurm knows their state.
    """
    try:
        claims = {claimant(store, trial_id) for trial_id in trial_ids} - {None}
        known = [read_submission(store, each) for each in claims if each is not None]
        return all(
            each is None or (each.launcher == DRIVEN and not is_held(store, each.id)) for each in known
        )
    except (OSError, ValueError):  # a folder that we may only read, a torn file: we do not know
        return False


def claim(store: Store, trial_ids: Iterable[str], submission: str) -> None:
    """Claim trials for a submission; an earlier claim ends.

    Raises:
        OSError: the folder of a trial cannot be used.
    """
    for trial_id in trial_ids:
        folder = store.trial_dir(trial_id)
        files.make_folder(folder, within=store.root)
        store.write_file(folder / CLAIM, json.dumps({"submission": submission}))
        files.remove(folder / ATTEMPT, within=store.root)


def claim_unless_begun(store: Store, trial_id: str, submission: Submission) -> Attempt | None:
    """Claim a trial, unless a job that the same launcher submitted earlier has begun it: return that attempt.

    A job left over from a killed driver may start at any time. Take the trial's lock; if another process
    holds it, wait up to 5 s for it to write its attempt. If the lock is still held after that, its holder is
    a driver running the trial itself: claim the trial.
    """
    end_s = time.monotonic() + _ABOUT_TO_S
    while True:
        with store.locked(trial_id) as is_free:
            begun = _begun(store, trial_id, submission.launcher)
            is_over = is_free or time.monotonic() > end_s
            if begun is None and is_over:
                claim(store, [trial_id], submission.id)
            if begun is not None or is_over:
                return begun
        time.sleep(_POLL_S)


def claimant(store: Store, trial_id: str) -> str | None:
    """Return the submission that a trial is claimed for; `None` where nobody has, or the file is torn."""
    claimed = decode_file(_Claim, store.trial_dir(trial_id) / CLAIM, _MOST_BYTES)
    return None if claimed is None else claimed.submission


def release(store: Store, trial_id: str, submission: str) -> None:
    """End the claim of a submission on a trial; that of another one stands."""
    if claimant(store, trial_id) == submission:
        with suppress(OSError):  # the claim of a submission that is over means nothing
            files.remove(store.trial_dir(trial_id) / CLAIM, within=store.root)


def write_attempt(store: Store, trial_id: str, attempt: Attempt) -> None:
    """Write that a trial starts, or how its attempt ended."""
    store.write_file(store.trial_dir(trial_id) / ATTEMPT, json.dumps(encode(attempt)))


def read_attempt(store: Store, trial_id: str, submission: str) -> Attempt | None:
    """Return the attempt at a trial for `submission`; `None` where there was none, or the file is torn."""
    attempt = decode_file(Attempt, store.trial_dir(trial_id) / ATTEMPT, _MOST_BYTES)
    return attempt if attempt is not None and attempt.submission == submission else None


def write_trouble(store: Store, trial_id: str, submission: str, trouble: Trouble) -> None:
    """Write into the submission's folder that a trial's own cannot be used."""
    store.write_file(_trouble_path(store, trial_id, submission), json.dumps(encode(trouble)))


def read_trouble(store: Store, trial_id: str, submission: str) -> Trouble | None:
    """Return why the folder of a trial could not be used; `None` where nobody has said so."""
    return decode_file(Trouble, _trouble_path(store, trial_id, submission), _MOST_BYTES)


def record_for(store: Store, trial_id: str, submission: str) -> Record | None:
    """Return the record of a trial if it ran for `submission`."""
    try:
        record = store.read(trial_id)
    except (OSError, ValueError):
        return None
    job = record.environment.get("job")
    return record if isinstance(job, Mapping) and job.get("submission") == submission else None


def _begun(store: Store, trial_id: str, launcher: str) -> Attempt | None:
    """Return the attempt of a job at a trial that is claimed for a submission to `launcher`."""
    earlier = claimant(store, trial_id)
    known = None if earlier is None else read_submission(store, earlier)
    if known is None or known.launcher != launcher:
        return None
    attempt = read_attempt(store, trial_id, known.id)
    return attempt if attempt is not None and attempt.job is not None else None


def _trouble_path(store: Store, trial_id: str, submission: str) -> Path:
    return folder_of(store, submission) / f"trouble-{trial_id}.json"
