"""The sentences about one trial: how it ended, where it differs, what disturbed it."""

from __future__ import annotations

from collections.abc import Iterator

from harness.records.parity_result import Parity, joined
from harness.records.record import Failure, Record
from harness.report.facts.number_words import printable, shortened
from harness.report.facts.pipeline_notes import pipeline_notes
from harness.report.facts.plan_notes import plan_notes

_EXPLAINED = ("inert", "unverified")
_MOST_UNREAD = 4
_MOST_OF_A_LINE = 400  # characters of a message; CUDA's out-of-memory has some 300


def notes(record: Record) -> Iterator[str]:
    """Yield the notes on a trial: failures, differences, and strategies that did nothing."""
    if record.error is not None:
        yield f"{record.status}, {failure(record.error)}"
    yield from differences(record)
    if record.parity is not None:
        yield from _uncompared(record.parity)
    if record.probes is not None:
        yield from (f"probes: {each}" for each in record.probes.notes)
    yield from plan_notes(record)
    yield from pipeline_notes(record)
    if record.work is not None and record.work.never_fired:
        yield f"never fired: {', '.join(record.work.never_fired)}"
    if record.work is not None:
        yield from record.work.policy_notes()
    yield from _remarks(record)


def _remarks(record: Record) -> Iterator[str]:
    """Yield what explains the verdict, what may have disturbed the times, and what the user noted."""
    if record.verdict in _EXPLAINED and record.reason is not None:
        yield f"{record.verdict}: {record.reason}"
    if foreign := record.environment.get("foreign_processes"):
        yield f"{len(foreign)} foreign process(es) used the device while it ran"
    if record.note:
        yield record.note


def _uncompared(parity: Parity) -> Iterator[str]:
    if any(link.absent for link in parity.links):
        yield "outputs are not compared: the plan includes the loss, and they are never whole"
    if unread := joined(link.uncompared for link in parity.links):
        more = f" and {len(unread) - _MOST_UNREAD} more" if len(unread) > _MOST_UNREAD else ""
        yield f"state that is not compared: {', '.join(unread[:_MOST_UNREAD])}{more}"


def failure(error: Failure) -> str:
    """Return what ended a trial: kind, rank, phase and the first line of its message."""
    rank = "" if error.rank is None else f" on rank {error.rank}"
    phase = "" if error.phase is None else f" during {error.phase}"
    return f"{error.kind}{rank}{phase}: {first_line(error)}"


def first_line(error: Failure) -> str:
    """Return how a message begins."""
    line, *_ = [*printable(error.message).strip().splitlines(), ""]
    return shortened(line, _MOST_OF_A_LINE)


def differences(record: Record) -> Iterator[str]:
    """Yield the first difference from the twin in time, and that of every link of the chain."""
    if record.verdict == "differs" and record.parity is not None:
        yield from record.parity.differences()
    probes = record.probes
    if record.verdict == "differs" and probes is not None:
        finding = (f"{each.reason} (probe {each.probe})",) if (each := probes.finding) is not None else ()
        recomputed = (f"recomputation: {probes.recomputation}",) if probes.recomputation else ()
        yield from (*finding, *recomputed, *((probes.cause,) if probes.cause else ()))
