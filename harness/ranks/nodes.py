"""One trial on several nodes: node 0 directs, the agents of the other nodes follow.

They talk through a board that node 0 hosts for the life of the lane: a turn is announced there, and every
node beats and reports there. A node that stops early asks the others to stop. Followers detect the loss of
node 0 by the closed connection. Node 0 detects the loss of a follower by missing heartbeats.

What is announced is which job it is, in words that both sides know: no code and no pickle is sent.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path

from torch._C._distributed_c10d import TCPStore  # torch.distributed does not export it to type checkers

from harness.ranks import lane_board
from harness.ranks.agent import Agent
from harness.ranks.culprit import Outcome, decide_nodes
from harness.ranks.lane_board import Board, BoardLostError, HostedBoard, JoinedBoard, listening
from harness.ranks.live_ranks import HaltCheck
from harness.ranks.node_report import Halt, NodeReport
from harness.ranks.rank_report import RankReport, read_reports, report_path
from harness.ranks.start import RankJob
from harness.records.fields import decode
from harness.records.files import remove

_POLL_S = 0.05
_BEAT_S = 0.5
_SILENT_S = 5.0
"""Longest time without a beat."""

_LATE_S = 10.0
"""Longest wait for the report of a node that beats and whose ranks should be over: some survive SIGTERM."""

_SETTLE_S = 5.0
"""Longest wait for the reports of ranks that ended well: other nodes' files arrive late."""

_STORE_S = 30.0
_PEER = Halt(kind="peer", message="another node has ended its ranks", error_kind="peer")

JobWords = dict[str, str]
"""What says which job a turn is about, for those who have the same list of jobs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Turn:
    """The announcement of a trial. `is_over`: there are no more trials; the other fields are empty."""

    job: dict[str, str] = dataclasses.field(default_factory=dict)
    host: str = ""
    port: int = 0
    is_over: bool = False


class Director:
    """Node 0 of a lane: announces trials, runs its own ranks, and decides from the reports of all nodes.

    Args:
        hosts: names of all nodes, this one first.
        halt: why this lane should end its ranks now, or `None`.

    Attributes:
        lost: nodes that left no report on a trial; they follow no longer.
    """

    def __init__(self, agent: Agent, hosts: tuple[str, ...], halt: HaltCheck, board: HostedBoard) -> None:
        self.lost: set[int] = set()
        self._agent = agent
        self._hosts = hosts
        self._halt = halt
        self._board = board
        self._turns = count()

    def run(self, job: RankJob, words: JobWords) -> Outcome:
        """Run the ranks of `job` on all nodes to their end.

        Args:
            words: what tells the followers which job it is.
        """
        turn = next(self._turns)
        for rank in range(job.total):  # what an earlier attempt left is no report of this one
            remove(report_path(job.trial_dir, rank), within=job.trial_dir.parent)
        with hosted(self._board.host) as (host, port):
            self._board.set(f"turn{turn}", asdict(_Turn(job=words, host=host, port=port)))
            watch = _Watch(self._board, turn, others=range(1, len(self._hosts)), halt=self._halt)
            own = self._agent.supervise(dataclasses.replace(job, rendezvous=(host, port)), halt=watch.halt)
            with suppress(OSError):  # the ranks have left no folder, or no space: it counts all the same
                own.write(job.trial_dir)
            if not _is_complete(job):
                self._board.set(f"halt{turn}", value=True)
            reports = {0: own, **watch.reports(job)}
        self.lost |= set(range(len(self._hosts))) - reports.keys()
        return decide_nodes(
            job.total,
            node_reports=reports,
            rank_reports=_settled(job, reports),
            hosts=self._hosts,
        )

    def close(self) -> None:
        """Tell the others that there are no more trials, and wait until they have heard it."""
        self._board.set(f"turn{next(self._turns)}", asdict(_Turn(is_over=True)))
        waiting = set(range(1, len(self._hosts))) - self.lost
        end_s = time.monotonic() + _LATE_S
        while not all(self._board.get(f"left/{node}") for node in waiting) and time.monotonic() < end_s:
            time.sleep(_POLL_S)


@contextmanager
def hosted(host: str) -> Iterator[tuple[str, int]]:
    """Host the store where the ranks of several nodes meet, on a free port, while the block lasts.

    It listens on the interface of `host` alone. torch keeps addresses and counts of ranks there, which nobody
    unpickles. torch asks the name server for the name of every client. One that does not answer stalls each
    process that hosts or joins a store once, for 10 s by default; `RES_OPTIONS="timeout:1 attempts:1"`
    shortens it.

    Args:
        host: this machine, by the name or address that all nodes know.

    Yields:
        `host` and the port.

    Raises:
        OSError: this machine does not have the address of `host`.
    """
    with listening(host) as listener:
        port = listener.getsockname()[1]
        store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=_STORE_S),
            master_listen_fd=listener.detach(),  # the store closes it
        )
    try:
        yield host, port
    finally:
        del store


def follow(
    agent: Agent, node_rank: int, board: Board, halt: HaltCheck, job_of: Callable[[JobWords], RankJob]
) -> None:
    """Run this node's share of every trial that node 0 announces, until it announces the end.

    Args:
        halt: why this node should end its ranks now, or `None`.
        job_of: returns the job of node 0 that these words mean.

    Raises:
        BoardLostError: node 0 is gone.
    """
    with _beating(board, node_rank):
        for number in count():
            turn = _await_turn(board, number, halt)
            if turn is None or turn.is_over:
                board.set(f"left/{node_rank}", value=True)
                return
            job = dataclasses.replace(
                job_of(turn.job), node_rank=node_rank, rendezvous=(turn.host, turn.port)
            )
            report = agent.supervise(job, halt=_halt_of_follower(board, number, halt))
            with suppress(OSError):  # as on node 0
                report.write(job.trial_dir)
            if not _is_complete(job):
                board.set(f"halt{number}", value=True)
            board.set(f"report{number}/{node_rank}", asdict(report))


def join(address: Path, halt: HaltCheck) -> JoinedBoard | None:
    """Connect to the board of a lane as soon as its address is there; `None` when halted before.

    Raises:
        BoardLostError: node 0 is gone.
        ForeignFileError: somebody else has written the address.
    """
    while (board := lane_board.join(address)) is None:
        if halt() is not None:
            return None
        time.sleep(_POLL_S)
    return board


class _Watch:
    """The state of the other nodes during one turn, as node 0 sees it."""

    def __init__(self, board: Board, turn: int, *, others: range, halt: HaltCheck) -> None:
        self._board = board
        self._turn = turn
        self._halt = halt
        self._beats = dict.fromkeys(others, (-1, 0.0))  # the last one, and when it was new here

    def halt(self) -> Halt | None:
        """Return why node 0 should end its ranks now."""
        own = self._halt()
        if own is not None:
            return own
        is_silent = any(self._is_silent(node) for node in self._beats)
        return _PEER if is_silent or self._board.get(f"halt{self._turn}") else None

    def reports(self, job: RankJob) -> dict[int, NodeReport]:
        """Return the reports of the other nodes; one that stays silent is missing."""
        found: dict[int, NodeReport] = {}
        patience_s = job.deadline_s + _LATE_S if _is_complete(job) else _LATE_S
        end_s = time.monotonic() + patience_s
        missing = set(self._beats)
        while missing and time.monotonic() < end_s and not self._must_go():
            for node in list(missing):
                report = self._board.get(f"report{self._turn}/{node}")
                if report is not None:
                    found[node] = NodeReport.of(report)
                if node in found or self._is_silent(node):
                    missing.remove(node)
            time.sleep(_POLL_S)
        return found

    def _must_go(self) -> bool:
        halt = self._halt()
        return halt is not None and halt.kind == "terminated"

    def _is_silent(self, node: int) -> bool:
        """Say if a node has begun to beat and stopped, or has left the lane before, without a report."""
        if self._board.get(f"report{self._turn}/{node}") is not None:
            return False
        if self._board.get(f"left/{node}"):
            return True
        number = self._board.get(f"beat/{node}")
        if number is None:
            return False
        if number != self._beats[node][0]:
            self._beats[node] = number, time.monotonic()
        return time.monotonic() - self._beats[node][1] > _SILENT_S


@contextmanager
def _beating(board: Board, node_rank: int) -> Iterator[None]:
    """Beat while the block lasts, whatever the agent is busy with."""
    is_over = threading.Event()

    def beat() -> None:
        with suppress(BoardLostError):  # node 0 is gone: the agent hears it by itself
            for number in count():
                board.set(f"beat/{node_rank}", number)
                if is_over.wait(_BEAT_S):
                    return

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(_SILENT_S)


def _halt_of_follower(board: Board, number: int, halt: HaltCheck) -> HaltCheck:
    return lambda: halt() or (_PEER if board.get(f"halt{number}") else None)


def _await_turn(board: Board, number: int, halt: HaltCheck) -> _Turn | None:
    while (announced := board.get(f"turn{number}")) is None:
        if halt() is not None:
            return None
        time.sleep(_POLL_S)
    return decode(_Turn, announced, "turn")


def _settled(job: RankJob, nodes: Mapping[int, NodeReport]) -> Mapping[int, RankReport]:
    deaths = [death for node in nodes.values() for death in node.deaths]
    are_good = len(deaths) == job.total and all(death.code == 0 for death in deaths)
    end_s = time.monotonic() + _SETTLE_S
    while len(reports := read_reports(job.trial_dir)) < job.total and are_good and time.monotonic() < end_s:
        time.sleep(_POLL_S)
    return reports


def _is_complete(job: RankJob) -> bool:
    reports = read_reports(job.trial_dir)
    return all(rank in reports and reports[rank].state == "ok" for rank in job.local)
