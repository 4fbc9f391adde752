"""One trial on several nodes: node 0 directs, the agents of the other nodes follow.

They talk through a TCP store that node 0 hosts for the life of the lane: a turn is announced there, and every
node beats and reports there. A node that stops early asks the others to stop. Followers detect the loss of
node 0 by the closed connection. Node 0 detects the loss of a follower by missing heartbeats.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import pickle
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from pathlib import Path

from torch._C._distributed_c10d import TCPStore  # torch.distributed does not export it to type checkers
from torch.distributed import DistError

from harness.ranks.agent import Agent
from harness.ranks.culprit import Outcome, decide_nodes
from harness.ranks.live_ranks import HaltCheck
from harness.ranks.node_report import Halt, NodeReport
from harness.ranks.rank_report import RankReport, read_reports, report_path
from harness.ranks.start import RankJob
from harness.records.store import write_atomically

_POLL_S = 0.05
_BEAT_S = 0.5
_SILENT_S = 5.0
"""Longest time without a beat."""

_LATE_S = 10.0
"""Longest wait for the report of a node that beats and whose ranks should be over: some survive SIGTERM."""

_SETTLE_S = 5.0
"""Longest wait for the reports of ranks that ended well: other nodes' files arrive late."""

_STORE_S = 30.0
_DONE = "done"
_PEER = Halt(kind="peer", message="another node has ended its ranks", error_kind="peer")


class Director:
    """Node 0 of a lane: announces trials, runs its own ranks, and decides from the reports of all nodes.

    Args:
        agent: agent of this node.
        hosts: names of all nodes, this one first.
        halt: why this lane should end its ranks now, or `None`.
        store: store of the lane.
    """

    def __init__(self, agent: Agent, hosts: tuple[str, ...], halt: HaltCheck, store: TCPStore) -> None:
        self._agent = agent
        self._hosts = hosts
        self._halt = halt
        self._store = store
        self._turns = count()

    def run(self, job: RankJob) -> Outcome:
        """Run the ranks of `job` on all nodes to their end."""
        turn = next(self._turns)
        for rank in range(job.total):  # what an earlier attempt left is no report of this one
            report_path(job.trial_dir, rank).unlink(missing_ok=True)
        with hosted(self._hosts[0]) as rendezvous:
            job = dataclasses.replace(job, rendezvous=rendezvous)
            self._store.set(f"turn{turn}", base64.b64encode(pickle.dumps(job)).decode())
            watch = _Watch(self._store, turn, others=range(1, len(self._hosts)), halt=self._halt)
            own = self._agent.supervise(job, halt=watch.halt)
            own.write(job.trial_dir)
            if not _is_complete(job):
                self._store.set(f"halt{turn}", "")
            reports = {0: own, **watch.reports(job)}
        return decide_nodes(
            job.total,
            node_reports=reports,
            rank_reports=_settled(job, reports),
            hosts=self._hosts,
        )

    def close(self) -> None:
        """Tell the others that there are no more trials, and wait until they have heard it."""
        self._store.set(f"turn{next(self._turns)}", _DONE)
        heard = [f"left/{node}" for node in range(1, len(self._hosts))]
        end_s = time.monotonic() + _LATE_S
        while not self._store.check(heard) and time.monotonic() < end_s:
            time.sleep(_POLL_S)


@contextmanager
def hosted(host: str) -> Iterator[tuple[str, int]]:
    """Host the store where the ranks of several nodes meet, on a free port, while the block lasts.

    torch asks the name server for the name of every client. One that does not answer stalls each process
    that hosts or joins a store once, for 10 s by default; `RES_OPTIONS="timeout:1 attempts:1"` shortens it.

    Args:
        host: this machine, by the name or address that all nodes know.

    Yields:
        `host` and the port.

    Raises:
        torch.distributed.DistError: this machine cannot be reached as `host`.
    """
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_STORE_S))
    try:
        yield host, store.port
    finally:
        del store


def follow(agent: Agent, node_rank: int, store: TCPStore, halt: HaltCheck) -> None:
    """Run this node's share of every trial that node 0 announces, until it announces the end.

    Raises:
        torch.distributed.DistError: node 0 is gone.
    """
    with _beating(store, node_rank):
        for turn in count():
            announced = _await(store, f"turn{turn}", halt)
            if announced is None or announced == _DONE:
                store.set(f"left/{node_rank}", "")
                return
            job = dataclasses.replace(pickle.loads(base64.b64decode(announced)), node_rank=node_rank)  # noqa: S301 (from node 0)
            report = agent.supervise(job, halt=_halt_of_follower(store, turn, halt))
            report.write(job.trial_dir)
            if not _is_complete(job):
                store.set(f"halt{turn}", "")
            store.set(f"report{turn}/{node_rank}", json.dumps(dataclasses.asdict(report)))


@contextmanager
def hosting(host: str, address: Path) -> Iterator[TCPStore]:
    """Host the store of a lane, and leave its address in a file for the other nodes."""
    with hosted(host) as (name, port):
        store = TCPStore(name, port, is_master=False, wait_for_workers=False)
        write_atomically(address, json.dumps([name, port]))
        yield store


def join(address: Path, halt: HaltCheck) -> TCPStore | None:
    """Connect to the store of a lane as soon as its address is there; `None` when halted before."""
    while not address.exists():
        if halt() is not None:
            return None
        time.sleep(_POLL_S)
    host, port = json.loads(address.read_text(encoding="utf-8"))
    return TCPStore(host, port, is_master=False, wait_for_workers=False)


class _Watch:
    """What node 0 sees of the other nodes during one turn."""

    def __init__(self, store: TCPStore, turn: int, *, others: range, halt: HaltCheck) -> None:
        self._store = store
        self._turn = turn
        self._halt = halt
        self._beats = dict.fromkeys(others, (b"", 0.0))  # the last one, and when it was new here

    def halt(self) -> Halt | None:
        """Return why node 0 should end its ranks now."""
        own = self._halt()
        if own is not None:
            return own
        is_silent = any(self._is_silent(node) for node in self._beats)
        return _PEER if is_silent or self._store.check([f"halt{self._turn}"]) else None

    def reports(self, job: RankJob) -> dict[int, NodeReport]:
        """Return the reports of the other nodes; one that stays silent is missing."""
        found: dict[int, NodeReport] = {}
        patience_s = job.deadline_s + _LATE_S if _is_complete(job) else _LATE_S
        end_s = time.monotonic() + patience_s
        missing = set(self._beats)
        while missing and time.monotonic() < end_s and not self._must_go():
            for node in list(missing):
                key = f"report{self._turn}/{node}"
                if self._store.check([key]):
                    found[node] = NodeReport.parse(self._store.get(key))
                if node in found or self._is_silent(node):
                    missing.remove(node)
            time.sleep(_POLL_S)
        return found

    def _must_go(self) -> bool:
        halt = self._halt()
        return halt is not None and halt.kind == "terminated"

    def _is_silent(self, node: int) -> bool:
        """Whether a node has begun to beat and stopped, or has left the lane before, without a report."""
        if self._store.check([f"report{self._turn}/{node}"]):
            return False
        if self._store.check([f"left/{node}"]):
            return True
        key = f"beat/{node}"
        if not self._store.check([key]):
            return False
        value = self._store.get(key)
        if value != self._beats[node][0]:
            self._beats[node] = value, time.monotonic()
        return time.monotonic() - self._beats[node][1] > _SILENT_S


@contextmanager
def _beating(store: TCPStore, node_rank: int) -> Iterator[None]:
    """Beat while the block lasts, whatever the agent is busy with."""
    is_over = threading.Event()

    def beat() -> None:
        with suppress(DistError):  # node 0 is gone: the agent hears it by itself
            for number in count():
                store.set(f"beat/{node_rank}", str(number))
                if is_over.wait(_BEAT_S):
                    return

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(_SILENT_S)


def _halt_of_follower(store: TCPStore, turn: int, halt: HaltCheck) -> HaltCheck:
    return lambda: halt() or (_PEER if store.check([f"halt{turn}"]) else None)


def _await(store: TCPStore, key: str, halt: HaltCheck) -> str | None:
    while not store.check([key]):
        if halt() is not None:
            return None
        time.sleep(_POLL_S)
    return store.get(key).decode()


def _settled(job: RankJob, nodes: Mapping[int, NodeReport]) -> Mapping[int, RankReport]:
    """Return the reports of the ranks, those of all if all ended well."""
    deaths = [death for node in nodes.values() for death in node.deaths]
    are_good = len(deaths) == job.total and all(death.code == 0 for death in deaths)
    end_s = time.monotonic() + _SETTLE_S
    while len(reports := read_reports(job.trial_dir)) < job.total and are_good and time.monotonic() < end_s:
        time.sleep(_POLL_S)
    return reports


def _is_complete(job: RankJob) -> bool:
    """Whether every rank of this node has its result."""
    reports = read_reports(job.trial_dir)
    return all(rank in reports and reports[rank].state == "ok" for rank in job.local)
