"""The culprit of a trial: from reports of nodes and ranks to one outcome, by rules and without side effects.

1. Every rank reported a result: `ok`, whatever happened to the processes and nodes afterwards.
2. The earliest own failure (exception, signal, exit without a report) is the cause.
3. Somebody ended an agent (SIGTERM, preemption): `lost`.
4. A node left no report, because it or its agent died: `lost`. What the other nodes saw is its echo.
5. Out of time: the rank that does not wait for the others is the cause; between equals the one furthest
   behind, then the one silent for longest. Where all wait in collectives, more time is no help.
6. A communication error is the echo of another rank's failure: it wins only where nothing else happened.

Clocks of nodes differ, so that times are compared within a node. Between nodes, a failure where ranks had to
end because another node had failed comes after one where they had not; only where that says nothing, nodes
failed within a fraction of a second of one another, do their clocks decide.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.ranks.node_report import Death, Halt, NodeReport
from harness.ranks.rank_report import PHASES, RankReport
from harness.records.record import Failure

_REFUSALS = ("StrategyError", "InfeasibleBudget", "UnprovenError")  # by the names that ranks report
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
_MOST_PLACES = 4
_INNERMOST_FRAMES = 3
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_IN_ENGINE = "in _engine_run_backward"
_COLLECTIVES = ("/torch/distributed/", "/torch/_library/autograd.py")
"""Where torch waits for others: functional collectives are operators with a formula in Python."""

_WAITS_IN = "waits in"

_SIGNALS = {"terminated": signal.SIGTERM, "time_limit": signal.SIGUSR2}
"""How schedulers announce a halt, not to the agent alone but to all processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of a trial.

    Fields:
        status: `ok`, `oom`, `failed`, `timeout`, `lost`, or `refused` by a strategy in the first forward.
        error: `None` when `ok`.
        results: what the ranks returned, in order of rank; empty unless `ok`.
    """

    status: str
    error: Failure | None = None
    results: Sequence[dict[str, Any]] = field(default=())


@dataclass(frozen=True, slots=True)
class _Cause:
    """A failure that may have ended the trial.

    Fields:
        is_later: whether its node was asked to end its ranks, because another node had failed.
        time: time of the failure, in seconds of `time.time` on its node.
        kind, message: kind and message of the exception or the death.
    """

    is_later: bool
    time: float
    rank: int
    kind: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    """The facts that are known of a trial that is over.

    Fields:
        hosts: names of its nodes, in order.
        nodes: reports of its nodes, by index; that of a node without a report is missing.
        reports: last reports of its ranks; that of a rank without one is missing.
    """

    ranks: range
    hosts: Sequence[str]
    nodes: Mapping[int, NodeReport]
    reports: Mapping[int, RankReport]

    @property
    def missing(self) -> list[int]:
        return [node for node in range(len(self.hosts)) if node not in self.nodes]

    @property
    def halts(self) -> list[Halt]:
        """The halts in order of nodes."""
        return [node.halt for _, node in sorted(self.nodes.items()) if node.halt is not None]

    def ranks_of(self, node: int) -> range:
        count = len(self.ranks) // len(self.hosts)
        return range(node * count, (node + 1) * count)

    def node_of(self, rank: int) -> NodeReport | None:
        return self.nodes.get(rank * len(self.hosts) // len(self.ranks))

    def is_final(self, rank: int) -> bool:
        return rank in self.reports and self.reports[rank].is_final

    def phase_of(self, rank: int) -> str:
        return self.reports[rank].phase if rank in self.reports else PHASES[0]


def decide_nodes(
    world_size: int,
    *,
    node_reports: Mapping[int, NodeReport],
    rank_reports: Mapping[int, RankReport],
    hosts: Sequence[str],
) -> Outcome:
    """Return the outcome of a trial whose processes have all ended.

    Args:
        world_size: ranks of the trial; nodes hold equal shares of them, in order.
        node_reports: reports by node; a node whose agent left none is missing.
        rank_reports: the last report of every rank that wrote one, in this attempt; those of ranks beyond
            `world_size` are of another one.
    """
    reports = {rank: report for rank, report in rank_reports.items() if rank < world_size}
    trial = _Trial(ranks=range(world_size), hosts=hosts, nodes=node_reports, reports=reports)
    if all(rank in reports and reports[rank].state == "ok" for rank in trial.ranks):
        return Outcome(status="ok", results=tuple(reports[rank].result or {} for rank in trial.ranks))
    causes = sorted(_causes(trial), key=lambda cause: (cause.is_later, cause.time, cause.rank))
    own = [cause for cause in causes if not is_communication(cause.kind, cause.message)]
    if own:
        return _failure(own[0], trial)
    return _halted(trial) or _echo(causes, trial)


def _halted(trial: _Trial) -> Outcome | None:
    ended = next((halt for halt in trial.halts if halt.kind == "terminated"), None)
    if ended is not None:
        return _lost(ended.message, kind=ended.error_kind)
    if trial.missing:
        node = trial.missing[0]
        reached = max((trial.phase_of(rank) for rank in trial.ranks_of(node)), key=PHASES.index)
        return _lost(f"the agent of node {node} ({trial.hosts[node]}) left no report", phase=reached)
    over = next((halt for halt in trial.halts if halt.is_timeout), None)
    return None if over is None else _timeout(over, trial)


def _echo(causes: Sequence[_Cause], trial: _Trial) -> Outcome:
    """Return the outcome where nothing is left but what others have caused."""
    if causes:
        return _failure(causes[0], trial)
    if trial.halts:
        return _lost(trial.halts[0].message, kind=trial.halts[0].error_kind)
    return _lost("the ranks ended without a report and without a cause")


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
    frames = _main_frames(stack)
    return any(line.endswith(_IN_ENGINE) for line in frames[:1]) or _collective(frames) is not None


def place_of(stack: str) -> str:
    """Return where the main thread is, and in which collective it waits; empty if nobody knows.

    The place is the innermost function that is not torch's.

    Args:
        stack: as of `is_waiting`.
    """
    frames = _main_frames(stack)
    own = next((found for line in frames if "/torch/" not in line and (found := _FRAME.match(line))), None)
    if own is None:
        return ""
    path, line, function = own.groups()
    where = f"{function} ({Path(path).name}, line {line})"
    if any(each.endswith(_IN_ENGINE) for each in frames):
        where += " of backward"
    collective = _collective(frames)
    return f"is in {where}" if collective is None else f"{_WAITS_IN} {collective}, called by {where}"


def _collective(frames: Sequence[str]) -> str | None:
    """Return the collective that the innermost frames belong to; `None` where they belong to none."""
    inner = [line for line in frames[:_INNERMOST_FRAMES] if any(place in line for place in _COLLECTIVES)]
    named = next((line.rpartition(" in ")[2] for line in inner if _COLLECTIVES[0] in line), "a collective")
    return named if inner else None


def _main_frames(stack: str) -> list[str]:
    _, found, main = stack.rpartition("(most recent call first):")
    return [line for line in main.splitlines() if found and line.startswith("  File ")]


def _causes(trial: _Trial) -> Iterator[_Cause]:
    for rank, report in trial.reports.items():
        if report.state == "error":
            is_later = _ended_for_peer(trial.node_of(rank))
            yield _Cause(is_later, report.time, rank, report.kind or "", report.message or "")
    for node in trial.nodes.values():
        for death in node.deaths:
            if not (trial.is_final(death.rank) or death.ended or _is_part_of_halt(death, node)):
                yield _Cause(_ended_for_peer(node), death.time, death.rank, *_describe(death))


def _ended_for_peer(node: NodeReport | None) -> bool:
    return node is not None and node.halt is not None and node.halt.kind == "peer"


def _is_part_of_halt(death: Death, node: NodeReport) -> bool:
    """Return whether a rank died of the signal that told the agent to end it."""
    number = None if node.halt is None else _SIGNALS.get(node.halt.kind)
    return number is not None and death.code == -number


def _describe(death: Death) -> tuple[str, str]:
    if death.kind is not None:  # it could not write its report
        return death.kind, death.message or ""
    if death.code < 0:
        number = -death.code
        known = {member.value: member.name for member in signal.Signals}
        name = known.get(number, f"signal {number}")
        hint = "; the kernel sends it when memory is exhausted" if name == "SIGKILL" else ""
        return name, f"rank {death.rank} was killed by {name}{hint}"
    return f"exit {death.code}", f"rank {death.rank} exited with status {death.code} and without a result"


def _failure(cause: _Cause, trial: _Trial) -> Outcome:
    if is_out_of_memory(cause.kind, cause.message):
        status = "oom"
    else:
        status = "refused" if cause.kind in _REFUSALS else "failed"
    return Outcome(status=status, error=_error(cause.kind, cause.message, cause.rank, trial))


def _lost(message: str, *, kind: str = "lost", phase: str | None = None) -> Outcome:
    return Outcome(status="lost", error=Failure(kind=kind, message=message, phase=phase))


def _timeout(over: Halt, trial: _Trial) -> Outcome:
    """Return the outcome of a trial whose time was over; the rank with the least progress is named."""
    unfinished = [rank for rank in trial.ranks if not trial.is_final(rank)]
    suspects = unfinished or [rank for rank in trial.ranks if trial.reports[rank].state == "error"]
    rank = min(suspects, key=lambda rank: _progress(rank, trial))
    report = trial.reports.get(rank)
    if report is None:
        message = f"{over.message}; rank {rank} never reported"
    else:
        steps = f", step {report.done} of {report.total}" if report.total else ""
        silence_s = _silence_s(report, trial)
        message = (
            f"{over.message}; rank {rank} is in phase {report.phase}{steps}, silent for {silence_s:.1f} s"
        )
    return Outcome(status="timeout", error=_error("timeout", f"{message}{_help(over, trial)}", rank, trial))


def _help(over: Halt, trial: _Trial) -> str:
    """Return where the ranks stand if all of them wait, and whether more time helps.

    Where all wait at one place, a slow collective may be all that is wrong.
    """
    places = []
    waiting = {rank for node in trial.nodes.values() for rank in node.waiting}
    if len(trial.ranks) > 1 and waiting == set(trial.ranks):
        places = [place for _, node in sorted(trial.nodes.items()) for place in node.places]
    shown = "; ".join(places[:_MOST_PLACES])
    waits = [place.partition(_WAITS_IN) for place in places]
    if all(found for _, found, _ in waits) and len({where for _, _, where in waits}) > 1:
        return f"; every rank waits for others, which more time does not help: {shown}"
    more = "; a larger protocol.deadline_s gives it more time" if over.kind == "deadline" else ""
    return f"; {shown}{more}" if shown else more


def _progress(rank: int, trial: _Trial) -> tuple[bool, int, int, float, int]:
    """Order suspects: who does not wait first, then who is behind, then who was silent longest."""
    node, report = trial.node_of(rank), trial.reports.get(rank)
    is_waiting_rank = node is not None and rank in node.waiting
    if report is None:
        return is_waiting_rank, -1, 0, 0.0, rank
    return is_waiting_rank, PHASES.index(report.phase), report.done, -_silence_s(report, trial), rank


def _silence_s(report: RankReport, trial: _Trial) -> float:
    """Return how long the rank had said nothing at the end, by the clock of its node."""
    node = trial.node_of(report.rank)
    return 0.0 if node is None else max(node.time - report.time, 0.0)


def _error(kind: str, message: str, rank: int, trial: _Trial) -> Failure:
    return Failure(kind=kind, message=message, rank=rank, phase=trial.phase_of(rank), log=f"rank{rank}.log")
