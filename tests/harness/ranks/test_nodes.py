"""Node 0 directs, the others follow: over a real store, with agents that run no ranks."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
from torch._C._distributed_c10d import TCPStore  # torch.distributed does not export it to type checkers

from harness.ranks import nodes
from harness.ranks.agent import Agent
from harness.ranks.culprit import Outcome
from harness.ranks.lane_board import Board, BoardLostError, HostedBoard, hosting
from harness.ranks.live_ranks import HaltCheck
from harness.ranks.node_report import Halt, NodeReport
from harness.ranks.nodes import Director, JobWords, follow, hosted, join
from harness.ranks.rank_report import RankReport, report_path
from harness.ranks.start import RankJob

HOSTS = ("localhost", "beta")
LIMIT = Halt(kind="time_limit", message="the time limit of the job was reached", error_kind="timeout")
FOR_EVER_S = 3600.0
OVER = Halt(kind="terminated", message="the test is over")


class _Agent:
    """Leaves the reports of its ranks.

    Args:
        node: of this agent.
        kind: of the error of its rank; `None`: it ends well; `halted`: it runs until it is halted; `gone`: it
            never comes back to report.
    """

    def __init__(self, node: int, kind: str | None = None) -> None:
        self.node, self.kind = node, kind
        self.jobs: list[RankJob] = []

    def supervise(self, job: RankJob, watch: Any = None, halt: HaltCheck | None = None) -> NodeReport:
        assert watch is None
        assert halt is not None
        self.jobs.append(job)
        (rank,) = job.local
        halted = halt()
        if self.kind == "gone":
            raise _GoneError
        if self.kind == "halted":
            while halted is None:
                halted = halt()
        elif self.kind is None:
            self._say(job, rank, state="ok", result={"rank": rank})
        else:
            self._say(job, rank, state="error", kind=self.kind, message="no")
        host = HOSTS[self.node]
        return NodeReport(node_rank=self.node, host=host, time=2.0, halt=halted)

    def _say(self, job: RankJob, rank: int, **fields: Any) -> None:
        RankReport(rank=rank, phase="instrument", time=1.0, **fields).write(job.trial_dir)


class _GoneError(Exception):
    """The process of a node ended."""


def _never() -> Halt | None:
    return None


@pytest.fixture
def lane(tmp_path: Path) -> Iterator[_Pair]:
    with hosting("127.0.0.1", tmp_path / "address") as board, ThreadPoolExecutor(1) as pool:
        pair = _Pair(tmp_path, board, pool)
        yield pair
        pair.is_over = True  # a follower would wait for ever where a test has failed


class _Pair:
    """Two nodes, of which the second is a thread."""

    def __init__(self, folder: Path, board: HostedBoard, pool: ThreadPoolExecutor) -> None:
        self._folder, self.board, self._pool = folder, board, pool
        self.is_over = False

    def start(self, *kinds: str | None, halts: tuple[HaltCheck, HaltCheck] = (_never, _never)) -> _Running:
        first, second = (_Agent(node, kind) for node, kind in enumerate(kinds))
        director = Director(cast("Agent", first), HOSTS, halts[0], self.board)

        def halt() -> Halt | None:
            return OVER if self.is_over else halts[1]()

        def serve() -> None:
            theirs = join(self._folder / "address", halt)
            assert theirs is not None
            with closing(theirs):
                _follow(second, theirs, halt, self._folder)

        return _Running(director, self._pool.submit(serve), (first, second), self._folder)


class _Running:
    def __init__(
        self, director: Director, follower: Future[None], agents: tuple[_Agent, _Agent], folder: Path
    ) -> None:
        self.director, self.follower, self.agents, self._folder = director, follower, agents, folder

    def run(self, trial: str = "trial") -> Outcome:
        folder = self._folder / trial
        folder.mkdir(exist_ok=True)
        return self.director.run(_job(folder), {"trial": trial})


def _job(folder: Path) -> RankJob:
    return RankJob(
        trial_dir=folder, entry="nobody:runs", payload=None, ranks=1, world_size=2, deadline_s=60.0
    )


def _follow(agent: _Agent, board: Board, halt: HaltCheck, folder: Path) -> None:
    def job_of(words: JobWords) -> RankJob:
        return _job(folder / words["trial"])

    follow(cast("Agent", agent), 1, board, halt, job_of)


def test_a_store_is_hosted_on_a_free_port() -> None:
    with hosted("127.0.0.2") as (host, port), hosted(host) as (_, other):
        assert (host, port != other) == ("127.0.0.2", True)
        TCPStore(host, port, is_master=False, wait_for_workers=False).set("key", "value")
        with pytest.raises(ConnectionRefusedError):  # it listens there alone
            socket.create_connection(("127.0.0.3", port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port)).close()


def test_trials_are_announced_run_and_reported_one_after_the_other(lane: _Pair, tmp_path: Path) -> None:
    running = lane.start(None, None)
    for trial in ("a", "b"):
        outcome = running.run(trial)
        assert (outcome.status, outcome.results) == ("ok", ({"rank": 0}, {"rank": 1}))
        assert {path.name for path in (tmp_path / trial).glob("node*.json")} == {"node0.json", "node1.json"}
    running.director.close()
    running.follower.result()
    first, second = (agent.jobs for agent in running.agents)
    assert [job.rendezvous for job in first] == [job.rendezvous for job in second]
    assert [job.node_rank for job in second] == [1, 1]


@pytest.mark.parametrize(
    ("kinds", "rank"),
    [
        pytest.param((None, "ValueError"), 1, id="on the other node"),
        pytest.param(("ValueError", None), 0, id="on node 0"),
        pytest.param(("ValueError", "halted"), 0, id="on node 0 while the other one waits"),
        pytest.param(("halted", "ValueError"), 1, id="on the other node while node 0 waits"),
    ],
)
def test_a_rank_that_fails_ends_both_nodes_and_is_named(
    lane: _Pair, kinds: tuple[str | None, str | None], rank: int
) -> None:
    running = lane.start(*kinds)
    outcome = running.run()
    running.director.close()
    running.follower.result()
    assert outcome.error is not None
    found = (outcome.status, outcome.error.kind, outcome.error.rank, outcome.error.phase)
    assert found == ("failed", "ValueError", rank, "instrument")


def test_a_report_of_an_earlier_attempt_is_no_report(lane: _Pair, tmp_path: Path) -> None:
    folder = tmp_path / "trial"
    folder.mkdir()
    RankReport(rank=1, state="ok", phase="timing", time=0.0, result={"rank": "old"}).write(folder)
    running = lane.start(None, "ValueError")
    assert running.run().status == "failed"
    running.director.close()
    running.follower.result()


@pytest.mark.parametrize("node", [0, 1])
def test_the_time_limit_of_either_node_is_that_of_the_trial(lane: _Pair, node: int) -> None:
    begun: list[_Running] = []

    def halt() -> Halt | None:  # not before the trial has begun
        return LIMIT if begun and begun[0].agents[node].jobs else None

    halts = (halt, _never) if node == 0 else (_never, halt)
    running = lane.start("halted", "halted", halts=halts)
    begun.append(running)
    outcome = running.run()
    running.director.close()
    running.follower.result()
    assert outcome.error is not None
    assert (outcome.status, outcome.error.kind) == ("timeout", "timeout")
    assert outcome.error.message.startswith(LIMIT.message)


@pytest.mark.parametrize("kind", ["halted", None], ids=["while node 0 runs", "when node 0 has ended well"])
def test_a_node_that_vanishes_is_named_as_soon_as_it_is_silent(
    lane: _Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str | None
) -> None:
    monkeypatch.setattr(nodes, "_SILENT_S", 0.5)
    monkeypatch.setattr(nodes, "_LATE_S", FOR_EVER_S)
    running = lane.start(kind, "gone")
    outcome = running.run()
    assert outcome.status == "lost"
    assert outcome.error is not None
    assert "beta" in outcome.error.message
    assert running.director.lost == {1}
    assert not report_path(tmp_path / "trial", 1).exists()


def test_node_0_that_must_go_does_not_wait_for_reports(lane: _Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_LATE_S", FOR_EVER_S)
    running = lane.start(None, "halted", halts=(lambda: OVER, _never))
    assert running.run().status != "ok"


def test_a_node_beats_whatever_its_agent_is_busy_with(lane: _Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_BEAT_S", 0.01)
    running = lane.start(None, None)
    beats: set[int] = set()

    def supervise(job: RankJob, watch: Any = None, halt: HaltCheck | None = None) -> NodeReport:
        while len(beats) < 3:
            beats.add(lane.board.get("beat/1"))
        return _Agent.supervise(running.agents[1], job, watch, halt)

    monkeypatch.setattr(running.agents[1], "supervise", supervise)
    assert running.run().status == "ok"
    running.director.close()
    running.follower.result()


def test_a_follower_without_node_0_ends(tmp_path: Path) -> None:
    with hosting("127.0.0.1", tmp_path / "address"):
        theirs = join(tmp_path / "address", _never)
    assert theirs is not None
    with closing(theirs), pytest.raises(BoardLostError):
        _follow(_Agent(1), theirs, _never, tmp_path)


def test_a_follower_that_is_halted_before_node_0_is_there_leaves(tmp_path: Path) -> None:
    assert join(tmp_path / "address", lambda: LIMIT) is None


def test_a_follower_that_is_halted_between_trials_leaves(
    lane: _Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[None] = []

    def halt() -> Halt | None:
        asked.append(None)
        return LIMIT if len(asked) > 2 else None

    running = lane.start("halted", None, halts=(_never, halt))
    running.follower.result()
    monkeypatch.setattr(nodes, "_LATE_S", FOR_EVER_S)
    assert running.run().status == "lost"  # rather than to wait for a node that has left
    running.director.close()
