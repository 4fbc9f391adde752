"""What a driver makes of jobs that Slurm has put back into its queue."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest

from harness.launchers import slurm_client as slurm
from harness.launchers import slurm_ends as ends
from harness.launchers.base import InFlight, arrivals
from harness.launchers.slurm_client import JobState
from harness.records.claims import claim, write_attempt
from tests.harness.sweeping import attempt, error_of, sweep_in, task

STUCK = "launch failed requeued held"
NODE_FAILED = ("lost", "NODE_FAIL", "a node of job 7_0 failed (alpha)")
LAUNCH_FAILED = ("lost", "LAUNCH_FAILED", "Slurm could not start job 7_0 again")


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ends, "_SETTLE_S", 0.0)


def _look(
    folder: Path, state: JobState, monkeypatch: pytest.MonkeyPatch, *, yielded: bool | None
) -> tuple[tuple[str, str, str] | None, list[str]]:
    """Return the record after one look, and the jobs that were cancelled."""
    cancelled: list[str] = []

    def cancel(jobs: Collection[str]) -> None:
        cancelled.extend(jobs)

    monkeypatch.setattr(slurm, "states", lambda _jobs: {state.job: state})
    monkeypatch.setattr(slurm, "cancel", cancel)
    sweep, trial = sweep_in(folder), task()
    claim(sweep.store, [trial.trial_id], "mine")
    if yielded is not None:
        write_attempt(sweep.store, trial.trial_id, attempt("mine", job=state.job, yielded=yielded))
    look = ends.Look(sweep=sweep, time_min=60)
    flight = InFlight(task=trial, submission="mine", job=state.job)
    record = next(arrivals(sweep, [flight], look.ends))
    return None if record is None else error_of(record), cancelled


@pytest.mark.parametrize(
    ("state", "yielded", "expected"),
    [
        pytest.param({"state": "PENDING"}, None, None, id="it waits for its first start"),
        pytest.param({"state": "RUNNING"}, False, None, id="it runs"),
        pytest.param({"state": "PENDING", "restarts": 1}, True, None, id="it was preempted, and said so"),
        pytest.param({"state": "COMPLETING", "restarts": 1}, False, None, id="it may still say so"),
        pytest.param({"state": "PENDING", "restarts": 1}, False, NODE_FAILED, id="it died with its node"),
        pytest.param({"state": "RUNNING", "restarts": 1}, False, NODE_FAILED, id="it died, and runs again"),
        pytest.param(
            {"state": "PENDING", "reason": STUCK}, True, LAUNCH_FAILED, id="it will not start again"
        ),
        pytest.param({"state": "PENDING", "reason": STUCK}, None, LAUNCH_FAILED, id="it never started"),
        pytest.param({"state": "PENDING", "reason": "JobHeldUser"}, None, None, id="somebody holds it"),
    ],
)
def test_a_requeued_element(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: dict[str, str | int],
    yielded: bool | None,
    expected: tuple[str, str, str] | None,
) -> None:
    found = _look(tmp_path, JobState(job="7_0", **state), monkeypatch, yielded=yielded)  # type: ignore[arg-type]
    assert found == (expected, [] if expected is None else ["7_0"])


def test_a_job_that_carries_other_trials_too_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = JobState(job="7", state="PENDING", restarts=1)
    record, cancelled = _look(tmp_path, state, monkeypatch, yielded=False)
    assert record == ("lost", "NODE_FAIL", "a node of job 7 failed (alpha)")
    assert cancelled == []
