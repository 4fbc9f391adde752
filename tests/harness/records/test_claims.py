"""Claims and attempts: who may run a trial, and who has begun to."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from harness.records import claims
from harness.records.claims import (
    Submission,
    Trouble,
    claim,
    claim_unless_begun,
    claimant,
    holding,
    is_held,
    new_submission,
    read_attempt,
    read_submission,
    read_trouble,
    record_for,
    release,
    write_attempt,
    write_submission,
    write_trouble,
)
from harness.records.store import ATTEMPT, CLAIM, Store
from tests.harness.sweeping import AT, attempt, write_record

TRIAL = "0" * 12


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def _submitted(store: Store, launcher: str = "slurm") -> Submission:
    submission = new_submission(launcher, AT)
    write_submission(store, submission)
    return submission


def test_a_submission_is_read_as_it_was_written(store: Store) -> None:
    submission = _submitted(store)
    assert read_submission(store, submission.id) == submission
    told = replace(submission, jobs={TRIAL: "7_0"}, is_submitted=True)
    write_submission(store, told)
    assert read_submission(store, submission.id) == told
    assert told.job_name == f"acbench-{submission.id}"


def test_submissions_differ_and_one_that_is_gone_is_none(store: Store) -> None:
    assert new_submission("slurm", AT).id != new_submission("slurm", AT).id
    assert read_submission(store, "nobody") is None
    assert not is_held(store, "nobody")


def test_a_submission_is_held_as_long_as_its_driver_holds_it(store: Store) -> None:
    submission = _submitted(store).id
    assert not is_held(store, submission)
    with holding(store, submission):
        assert is_held(store, submission)
    assert not is_held(store, submission)


def test_a_claim_ends_the_one_before_and_its_attempt(store: Store) -> None:
    claim(store, [TRIAL], "first")
    write_attempt(store, TRIAL, attempt("first"))
    assert claimant(store, TRIAL) == "first"
    claim(store, [TRIAL], "second")
    assert claimant(store, TRIAL) == "second"
    assert read_attempt(store, TRIAL, "first") is None
    release(store, TRIAL, "first")
    assert claimant(store, TRIAL) == "second"
    release(store, TRIAL, "second")
    release(store, TRIAL, "second")
    assert claimant(store, TRIAL) is None


def test_an_attempt_belongs_to_its_submission(store: Store) -> None:
    store.prepare(TRIAL)
    begun = attempt("first", hosts=("alpha", "beta"))
    write_attempt(store, TRIAL, begun)
    assert read_attempt(store, TRIAL, "first") == begun
    assert read_attempt(store, TRIAL, "second") is None


@pytest.mark.parametrize(
    ("submission", "is_found"),
    [
        pytest.param("first", True, id="of this submission"),
        pytest.param("second", False, id="of another"),
        pytest.param(None, False, id="of nobody"),
    ],
)
def test_a_record_belongs_to_its_submission(store: Store, submission: str | None, is_found: bool) -> None:
    record = write_record(store, TRIAL, submission)
    assert record_for(store, TRIAL, "first") == (record if is_found else None)


def test_a_torn_record_is_none(store: Store) -> None:
    store.prepare(TRIAL)
    store.record_path(TRIAL).write_text("{")
    assert record_for(store, TRIAL, "first") is None


def test_prepare_keeps_claim_and_attempt(store: Store) -> None:
    claim(store, [TRIAL], "first")
    write_attempt(store, TRIAL, attempt("first"))
    folder = store.prepare(TRIAL)
    assert {path.name for path in folder.iterdir()} == {CLAIM, ATTEMPT}


@pytest.mark.parametrize(
    ("launcher", "job", "is_begun"),
    [
        pytest.param("slurm", "7", True, id="a job of this launcher has begun it"),
        pytest.param("slurm", None, False, id="a process that no scheduler knows"),
        pytest.param("slurm_packed", "7", False, id="a job of another launcher"),
    ],
)
def test_what_an_earlier_job_has_begun_is_not_claimed(
    store: Store, launcher: str, job: str | None, is_begun: bool
) -> None:
    earlier, now = _submitted(store, launcher), _submitted(store)
    claim(store, [TRIAL], earlier.id)
    begun = attempt(earlier.id, job=job)
    write_attempt(store, TRIAL, begun)
    assert claim_unless_begun(store, TRIAL, now) == (begun if is_begun else None)
    assert claimant(store, TRIAL) == (earlier.id if is_begun else now.id)


def test_a_trial_that_nobody_has_claimed_is_claimed(store: Store) -> None:
    submission = _submitted(store)
    assert claim_unless_begun(store, TRIAL, submission) is None
    assert claimant(store, TRIAL) == submission.id


def test_a_lane_that_is_about_to_begin_is_waited_for(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_ABOUT_TO_S", 3600.0)
    earlier, now = _submitted(store), _submitted(store)
    claim(store, [TRIAL], earlier.id)
    begun = attempt(earlier.id)
    with ThreadPoolExecutor(1) as pool, store.locked(TRIAL) as is_held:  # the lane has looked at its claim
        assert is_held
        found = pool.submit(claim_unless_begun, store, TRIAL, now)
        write_attempt(store, TRIAL, begun)
        assert found.result() == begun
    assert claimant(store, TRIAL) == earlier.id


def test_a_lock_that_stays_is_no_lane_about_to_begin(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_ABOUT_TO_S", 0.0)
    earlier, now = _submitted(store, "driven"), _submitted(store)
    claim(store, [TRIAL], earlier.id)
    with store.locked(TRIAL):
        assert claim_unless_begun(store, TRIAL, now) is None
    assert claimant(store, TRIAL) == now.id


def test_a_lane_that_leaves_the_trial_is_waited_for(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_ABOUT_TO_S", 3600.0)
    submission = _submitted(store)
    with ThreadPoolExecutor(1) as pool:
        with store.locked(TRIAL):
            found = pool.submit(claim_unless_begun, store, TRIAL, submission)
        assert found.result() is None
    assert claimant(store, TRIAL) == submission.id


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"submission": 3}', "[" * 100_000, "\x00"])
def test_a_torn_file_says_nothing_about_who_runs_a_trial(store: Store, content: str) -> None:
    folder = store.trial_dir(TRIAL)
    folder.mkdir()
    for name in (CLAIM, ATTEMPT):
        (folder / name).write_text(content)
    assert claimant(store, TRIAL) is None
    assert read_attempt(store, TRIAL, "ours") is None
    claim(store, [TRIAL], "ours")
    assert claimant(store, TRIAL) == "ours"


def test_a_lane_leaves_word_of_a_folder_that_it_cannot_use(store: Store) -> None:
    submission = _submitted(store).id
    assert read_trouble(store, TRIAL, submission) is None
    write_trouble(store, TRIAL, submission, Trouble(kind="OSError", message="full"))
    assert read_trouble(store, TRIAL, submission) == Trouble(kind="OSError", message="full")
