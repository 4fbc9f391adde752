"""Who ended the trial: from deaths and reports to one outcome, by rules and without side effects.

1. Every rank reported a result: `ok`, whatever happened to the processes afterwards.
2. The earliest own failure (exception, signal, exit without a report) is the cause.
3. A communication error is the echo of another rank's failure: it wins only where nothing else happened.
4. Out of time: the rank that does not wait for the others is the cause; between equals the one furthest
   behind, then the one silent for longest.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.rank_report import PHASES, RankReport

_OOM_KINDS = ("OutOfMemoryError", "MemoryError", "_ArrayMemoryError")
_OOM_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Cuda failure 2 'out of memory'",  # NCCL, wrapped into a DistBackendError
)
_COMMUNICATION_KINDS = ("DistError", "DistBackendError", "DistNetworkError", "DistStoreError")
_COMMUNICATION_MESSAGES = (
    "gloo/transport/",
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Connection was likely closed",
    "Broken pipe",
    "Timed out waiting",
    "Wait timeout",  # a file store
    "NCCL communicator",
    "NCCL error",
)
_INNERMOST_FRAMES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """The end of one rank's process.

    Fields:
        rank: in the whole trial.
        code: exit status; `-n` when signal n killed it.
        time: in seconds of `time.time`.
        ended: whether it was ended on purpose, because the trial was over already.
    """

    rank: int
    code: int
    time: float
    ended: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialError:
    """What went wrong, where.

    Fields:
        kind: exception class, signal name, `exit <code>`, `timeout` or `lost`.
        message: one sentence, or the text of the exception.
        rank: the culprit; `None` where no rank can be named.
        phase: the phase it was in.
        log: name of its log in the trial's folder.
    """

    kind: str
    message: str
    rank: int | None
    phase: str | None
    log: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a trial ended.

    Fields:
        status: `ok`, `oom`, `failed`, `timeout` or `lost`.
        error: `None` when `ok`.
        results: what the ranks returned, in order of rank; empty unless `ok`.
    """

    status: str
    error: TrialError | None = None
    results: Sequence[dict[str, Any]] = field(default=())


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadline:
    """The time of a trial has run out.

    Fields:
        seconds: how long it was given.
        time: when it was over, in seconds of `time.time`.
        waiting: ranks whose stack stands in a collective.
    """

    seconds: float
    time: float
    waiting: Collection[int] = ()


@dataclass(frozen=True, slots=True)
class _Cause:
    time: float
    rank: int
    kind: str
    message: str


def decide(
    ranks: Collection[int],
    *,
    deaths: Sequence[Death],
    reports: Mapping[int, RankReport],
    deadline: Deadline | None = None,
) -> Outcome:
    """Return the outcome of a trial whose processes have all ended.

    Args:
        ranks: the ranks that should have reported.
        deaths: of their processes.
        reports: the last report of every rank that wrote one.
        deadline: where it has passed.
    """
    if all(rank in reports and reports[rank].state == "ok" for rank in ranks):
        return Outcome(status="ok", results=tuple(reports[rank].result or {} for rank in sorted(ranks)))
    causes = sorted(_causes(deaths, reports), key=lambda cause: (cause.time, cause.rank))
    own = [cause for cause in causes if not is_communication(cause.kind, cause.message)]
    if own:
        return _failure(own[0], reports)
    if deadline is not None:
        return _timeout(ranks, reports, deadline)
    if causes:
        return _failure(causes[0], reports)
    return lost("the ranks ended without a report and without a cause")


def lost(message: str) -> Outcome:
    """Return the outcome of a trial that nobody could watch to its end."""
    return Outcome(
        status="lost", error=TrialError(kind="lost", message=message, rank=None, phase=None, log=None)
    )


def is_out_of_memory(kind: str, message: str) -> bool:
    """Return whether an exception says that memory, of the host or of a device, is exhausted."""
    return kind in _OOM_KINDS or any(text in message for text in _OOM_MESSAGES)


def is_communication(kind: str, message: str) -> bool:
    """Return whether an exception only says that another rank is gone or late."""
    if is_out_of_memory(kind, message):
        return False
    if kind in _COMMUNICATION_KINDS:
        return True
    return kind == "RuntimeError" and any(text in message for text in _COMMUNICATION_MESSAGES)


def is_waiting(stack: str) -> bool:
    """Return whether the main thread waits for other ranks, as far as its stack tells.

    DDP waits inside the autograd engine, which shows no frame of its own.

    Args:
        stack: what `faulthandler` wrote of all threads; the main thread is the last, innermost frame first.
    """
    _, found, main = stack.rpartition("(most recent call first):")
    frames = [line for line in main.splitlines() if line.startswith("  File ")]
    in_engine = any(line.endswith("in _engine_run_backward") for line in frames[:1])
    in_collective = any("/torch/distributed/" in line for line in frames[:_INNERMOST_FRAMES])
    return bool(found) and (in_engine or in_collective)


def _causes(deaths: Sequence[Death], reports: Mapping[int, RankReport]) -> Iterator[_Cause]:
    for report in reports.values():
        if report.state == "error":
            yield _Cause(report.time, report.rank, report.kind or "", report.message or "")
    for death in deaths:
        silent = death.rank not in reports or not reports[death.rank].is_final
        if silent and not death.ended:
            kind, message = _describe(death)
            yield _Cause(death.time, death.rank, kind, message)


def _describe(death: Death) -> tuple[str, str]:
    if death.code < 0:
        name = _signal_name(-death.code)
        hint = "; the kernel sends it when memory is exhausted" if name == "SIGKILL" else ""
        return name, f"rank {death.rank} was killed by {name}{hint}"
    return f"exit {death.code}", f"rank {death.rank} exited with status {death.code} and without a result"


def _signal_name(number: int) -> str:
    known = {member.value: member.name for member in signal.Signals}
    return known.get(number, f"signal {number}")


def _failure(cause: _Cause, reports: Mapping[int, RankReport]) -> Outcome:
    status = "oom" if is_out_of_memory(cause.kind, cause.message) else "failed"
    return Outcome(status=status, error=_error(cause.kind, cause.message, cause.rank, reports))


def _timeout(ranks: Collection[int], reports: Mapping[int, RankReport], deadline: Deadline) -> Outcome:
    unfinished = [rank for rank in ranks if rank not in reports or not reports[rank].is_final]
    suspects = unfinished or [rank for rank in ranks if reports[rank].state == "error"]
    rank = min(suspects, key=lambda rank: _progress(rank, reports, deadline))
    limit = f"no result within {deadline.seconds:g} s"
    report = reports.get(rank)
    if report is None:
        return Outcome(
            status="timeout", error=_error("timeout", f"{limit}; rank {rank} never reported", rank, reports)
        )
    steps = f", step {report.done} of {report.total}" if report.total else ""
    silence_s = max(deadline.time - report.time, 0)
    message = f"{limit}; rank {rank} is in phase {report.phase}{steps}, silent for {silence_s:.1f} s"
    return Outcome(status="timeout", error=_error("timeout", message, rank, reports))


def _progress(
    rank: int, reports: Mapping[int, RankReport], deadline: Deadline
) -> tuple[bool, int, int, float, int]:
    """Order suspects: who does not wait first, then who is behind, then who was silent longest."""
    report = reports.get(rank)
    if report is None:
        return rank in deadline.waiting, -1, 0, 0.0, rank
    return rank in deadline.waiting, PHASES.index(report.phase), report.done, report.time, rank


def _error(kind: str, message: str, rank: int, reports: Mapping[int, RankReport]) -> TrialError:
    phase = reports[rank].phase if rank in reports else PHASES[0]
    return TrialError(kind=kind, message=message, rank=rank, phase=phase, log=f"rank{rank}.log")
