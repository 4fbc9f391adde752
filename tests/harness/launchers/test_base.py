"""Flights: their records as they arrive, and what becomes of those that bring none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import pytest

from harness.launchers import base
from harness.launchers.base import End, InFlight, Sweep, arrivals, follow_packer
from harness.launchers.packing import Packer
from harness.records.claims import claim, claimant
from harness.records.record import Record
from tests.harness.sweeping import error_of, sweep_in, task, write_record

END = End(status="timeout", kind="TIMEOUT", message="time was over")


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return sweep_in(tmp_path)


def _flights(sweep: Sweep, count: int) -> list[InFlight]:
    flights = [InFlight(task=task(number), submission="ours", job="7") for number in range(count)]
    claim(sweep.store, (flight.task.trial_id for flight in flights), "ours")
    return flights


def _land(sweep: Sweep, flight: InFlight, submission: str = "ours") -> Record:
    return write_record(sweep.store, flight.task.trial_id, submission)


def _none(_open: Sequence[InFlight]) -> Mapping[str, End | None]:
    return {}


def test_records_arrive_in_any_order_and_end_their_claims(sweep: Sweep) -> None:
    first, second = _flights(sweep, 2)
    found = arrivals(sweep, [first, second], _none)
    assert next(found) is None
    record = _land(sweep, second)
    assert next(found) == record
    assert claimant(sweep.store, second.task.trial_id) is None
    assert claimant(sweep.store, first.task.trial_id) == "ours"
    assert next(found) is None
    record = _land(sweep, first)
    assert list(found) == [record, None]


def test_the_record_of_another_submission_is_not_the_one_awaited(sweep: Sweep) -> None:
    (flight,) = _flights(sweep, 1)
    _land(sweep, flight, "earlier")
    found = arrivals(sweep, [flight], _none)
    assert [next(found), next(found)] == [None, None]


def test_without_flights_nothing_is_asked(sweep: Sweep) -> None:
    assert list(arrivals(sweep, [], lambda _open: pytest.fail("asked"))) == []


def test_a_carrier_that_ended_leaves_a_record_that_says_so(sweep: Sweep) -> None:
    (flight,) = _flights(sweep, 1)
    record, pause = arrivals(sweep, [flight], lambda _open: {flight.task.trial_id: END})
    assert pause is None
    assert record is not None
    assert error_of(record) == ("timeout", "TIMEOUT", "time was over")
    assert record.environment["job"] == {"submission": "ours", "id": "7"}
    assert sweep.store.read(flight.task.trial_id) == record
    assert claimant(sweep.store, flight.task.trial_id) is None


def test_a_record_that_was_written_just_before_the_end_wins(sweep: Sweep) -> None:
    (flight,) = _flights(sweep, 1)
    written: list[Record] = []

    def ends(_open: Sequence[InFlight]) -> Mapping[str, End | None]:
        written.append(_land(sweep, flight))
        return {flight.task.trial_id: END}

    assert list(arrivals(sweep, [flight], ends)) == [*written, None]


def test_a_flight_that_was_called_off_is_dropped(sweep: Sweep) -> None:
    (flight,) = _flights(sweep, 1)
    assert list(arrivals(sweep, [flight], lambda _open: {flight.task.trial_id: None})) == [None]
    assert not sweep.store.record_path(flight.task.trial_id).exists()
    assert claimant(sweep.store, flight.task.trial_id) is None


def test_a_trial_that_was_taken_over_is_not_lost_for_the_one_who_lost_it(sweep: Sweep) -> None:
    (flight,) = _flights(sweep, 1)
    claim(sweep.store, [flight.task.trial_id], "another")
    record = _land(sweep, flight, "another")
    assert list(arrivals(sweep, [flight], lambda _open: {flight.task.trial_id: END})) == [None]
    assert sweep.store.read(flight.task.trial_id) == record
    assert claimant(sweep.store, flight.task.trial_id) == "another"


@pytest.mark.parametrize("end", [END, None], ids=["lost", "called off"])
def test_what_somebody_runs_is_waited_for(sweep: Sweep, end: End | None) -> None:
    (flight,) = _flights(sweep, 1)
    found = arrivals(sweep, [flight], lambda _open: {flight.task.trial_id: end})
    with sweep.store.locked(flight.task.trial_id):
        assert [next(found), next(found)] == [None, None]
        record = _land(sweep, flight)
    assert list(found) == [record, None]


class _Packer:
    """Goes through the looks of a test; `True` says that no lane runs any more."""

    def __init__(self, looks: Iterator[bool]) -> None:
        self._looks, self.stops = looks, 0

    def advance(self) -> bool:
        return next(self._looks, True)

    def stop(self) -> None:
        self.stops += 1


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_LOOK_S", 0.0)


def test_a_packer_is_followed_until_it_is_over(sweep: Sweep) -> None:
    first, second = _flights(sweep, 2)

    def looks() -> Iterator[bool]:
        yield False
        _land(sweep, first)
        yield False
        yield True

    found = list(follow_packer(sweep, cast("Packer", _Packer(looks())), [first, second]))
    assert [record.trial_id for record in found] == [first.task.trial_id, second.task.trial_id]
    assert error_of(found[1]) == ("lost", "lost", "the lanes ended before this trial began")


def test_a_packer_that_was_stopped_loses_nothing(sweep: Sweep) -> None:
    first, second = _flights(sweep, 2)

    def looks() -> Iterator[bool]:
        sweep.interrupts.stop_requested = True
        yield False
        yield False
        _land(sweep, first)
        yield True

    packer = _Packer(looks())
    found = list(follow_packer(sweep, cast("Packer", packer), [first, second]))
    assert [record.trial_id for record in found] == [first.task.trial_id]
    assert packer.stops == 1
    assert not sweep.store.record_path(second.task.trial_id).exists()
