"""Two agents stand for two nodes: whatever fails on either, their reports name it."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from harness.ranks.agent import Agent
from harness.ranks.culprit import Outcome, decide_nodes
from harness.ranks.node_report import Halt, NodeReport
from harness.ranks.nodes import hosted
from harness.ranks.rank_report import read_reports
from harness.ranks.start import RankJob
from tests.harness.processes import Waiter, has_begun, require_dead

ENTRIES = "tests.harness.rank_entries"
HOSTS = ("alpha", "beta")
HALT = Halt(kind="time_limit", message="the time limit of the job was reached")
PEER = Halt(kind="peer", message="another node has ended its ranks", error_kind="peer")


@pytest.fixture(scope="module")
def agents() -> Iterator[tuple[Agent, Agent]]:
    with Agent(preload=(ENTRIES,)) as first, Agent(preload=(ENTRIES,)) as second:
        yield first, second


def _job(folder: Path, entry: str, payload: Any = None, *, ranks: int = 1, **fields: Any) -> RankJob:
    return RankJob(
        trial_dir=folder,
        entry=f"{ENTRIES}:{entry}",
        payload=payload,
        ranks=ranks,
        world_size=2 * ranks,
        **{"deadline_s": 280.0, **fields},
    )


class _Trial:
    """One trial on two agents; a node that ends without all its results asks the other to end.

    Args:
        halt: of both nodes.
    """

    def __init__(self, halt: Callable[[], Halt | None] = lambda: None) -> None:
        self.reports: dict[int, NodeReport] = {}
        self._halt = halt
        self._failed = threading.Event()

    def run(
        self, agents: tuple[Agent, Agent], folder: Path, entry: str, payload: Any, *, ranks: int
    ) -> Outcome:
        with hosted("127.0.0.2") as address:
            jobs = [
                _job(folder, entry, payload, ranks=ranks, node_rank=node, rendezvous=address)
                for node in range(2)
            ]
            other = threading.Thread(target=self._supervise, args=(agents[1], jobs[1]))
            other.start()
            self._supervise(agents[0], jobs[0])
            other.join()
        return _decide(folder, 2 * ranks, self.reports)

    def _supervise(self, agent: Agent, job: RankJob) -> None:
        def halt() -> Halt | None:
            return PEER if self._failed.is_set() else self._halt()

        self.reports[job.node_rank] = agent.supervise(job, halt=halt)
        reports = read_reports(job.trial_dir)
        if not all(rank in reports and reports[rank].state == "ok" for rank in job.local):
            self._failed.set()


def _decide(folder: Path, world_size: int, reports: dict[int, NodeReport]) -> Outcome:
    return decide_nodes(world_size, node_reports=reports, rank_reports=read_reports(folder), hosts=HOSTS)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_of_two_nodes_meet(agents: tuple[Agent, Agent], tmp_path: Path, ranks: int) -> None:
    trial = _Trial()
    outcome = trial.run(agents, tmp_path, "ok", "x", ranks=ranks)
    expected = {"payload": "x", "sum": ranks * (2 * ranks + 1)}
    assert outcome == Outcome(status="ok", results=(expected,) * 2 * ranks)
    assert [report.halt for report in trial.reports.values()] == [None, None]
    assert [sorted(death.rank for death in trial.reports[node].deaths) for node in range(2)] == [
        list(range(ranks)),
        list(range(ranks, 2 * ranks)),
    ]


@pytest.mark.parametrize("culprit", [0, 1], ids=["on node 0", "on node 1"])
@pytest.mark.parametrize(
    ("fault", "status", "kind"),
    [
        ("ValueError", "failed", "ValueError"),
        ("cpu_oom", "oom", "RuntimeError"),
        ("SIGKILL", "failed", "SIGKILL"),
        ("SIGSEGV", "failed", "SIGSEGV"),
        ("exit 5", "failed", "exit 5"),
    ],
)
def test_a_fault_names_its_rank_on_whichever_node(
    agents: tuple[Agent, Agent], tmp_path: Path, fault: str, status: str, kind: str, culprit: int
) -> None:
    outcome = _Trial().run(agents, tmp_path, "fault_of", (fault, culprit), ranks=1)
    assert outcome.error is not None
    assert (outcome.status, asdict(outcome.error) | {"message": ""}) == (
        status,
        {"kind": kind, "message": "", "rank": culprit, "phase": "parity", "log": f"rank{culprit}.log"},
    )


@pytest.mark.parametrize("culprit", [0, 1], ids=["on node 0", "on node 1"])
def test_a_failure_ends_the_other_node_though_it_notices_nothing(
    agents: tuple[Agent, Agent], tmp_path: Path, culprit: int
) -> None:
    trial = _Trial()
    outcome = trial.run(agents, tmp_path, "fault_alone", ("ValueError", culprit), ranks=1)
    assert outcome.error is not None
    assert (outcome.error.kind, outcome.error.rank) == ("ValueError", culprit)
    assert [trial.reports[node].halt for node in (culprit, 1 - culprit)] == [None, PEER]


@pytest.mark.parametrize("culprit", [0, 1], ids=["on node 0", "on node 1"])
def test_out_of_time_the_rank_that_does_not_wait_is_named(
    agents: tuple[Agent, Agent], tmp_path: Path, culprit: int
) -> None:
    waiter = Waiter(tmp_path, 1 - culprit, HALT)
    outcome = _Trial(waiter.halt).run(agents, tmp_path, "fault_of", ("hang", culprit), ranks=1)
    assert outcome.error is not None
    assert (outcome.status, outcome.error.rank, outcome.error.phase) == ("timeout", culprit, "parity")
    assert outcome.error.message.startswith(f"{HALT.message}; rank {culprit} is in phase parity, silent for ")


_LOST, _TOLD = (
    (signal.SIGKILL, "lost", "the agent of node {0} ({1}) left no report"),
    (signal.SIGTERM, "SIGTERM", "told to end"),
)


@pytest.mark.parametrize(
    ("victim", "number", "kind", "message"),
    [
        pytest.param(0, *_TOLD, id="SIGTERM-of node 0"),
        pytest.param(1, *_LOST, id="SIGKILL-of node 1"),
        pytest.param(1, *_TOLD, id="SIGTERM-of node 1", marks=pytest.mark.matrix),
        pytest.param(0, *_LOST, id="SIGKILL-of node 0", marks=pytest.mark.matrix),
    ],
)
def test_the_end_of_an_agent_is_no_communication_error(
    agents: tuple[Agent, Agent], tmp_path: Path, victim: int, number: int, kind: str, message: str
) -> None:
    with hosted("127.0.0.2") as (host, port), contextlib.ExitStack() as undo:
        address = [host, str(port)]
        node = subprocess.Popen([sys.executable, "-c", _NODE, str(tmp_path), str(victim), *address])
        undo.callback(node.kill)
        ended = threading.Event()

        def end() -> None:
            """End the agent, once its rank has begun; asked for a halt, and never wants one."""
            if has_begun(tmp_path, 0, 1) and not ended.is_set():
                ended.set()
                node.send_signal(number)

        while victim not in read_reports(tmp_path):  # its interpreter and fork server start first
            assert node.poll() is None
            time.sleep(0.05)
        job = _job(tmp_path, "fault_of", ("hang", victim), node_rank=1 - victim, rendezvous=(host, port))
        own = agents[1 - victim].supervise(job, halt=end)
        node.wait()
    texts = [path.read_text("utf-8") for path in tmp_path.glob("node*.json")]
    left = {report.node_rank: report for report in map(NodeReport.of, map(json.loads, texts))}
    outcome = _decide(tmp_path, 2, {own.node_rank: own, **left})
    assert outcome.error is not None
    assert (outcome.status, outcome.error.kind, outcome.error.rank) == ("lost", kind, None)
    assert outcome.error.message == message.format(victim, HOSTS[victim])
    require_dead(int((tmp_path / f"pid{victim}").read_text("utf-8")))


_NODE = f"""
import signal, sys
from pathlib import Path
from harness.ranks.agent import Agent
from harness.ranks.start import RankJob
from harness.ranks.nodes import hosted
from harness.ranks.node_report import Halt

folder, node, host, port = sys.argv[1:]
told = []
end = Halt(kind="terminated", message="told to end", error_kind="SIGTERM")
signal.signal(signal.SIGTERM, lambda *_: told.append(end))
job = RankJob(
    trial_dir=Path(folder), entry="{ENTRIES}:fault_of", payload=("hang", int(node)), ranks=1, world_size=2,
    node_rank=int(node), rendezvous=(host, int(port)), deadline_s=280,
)
with Agent() as agent:
    agent.supervise(job, halt=lambda: told[0] if told else None).write(Path(folder))
"""
