from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.ranks.culprit import (
    Outcome,
    decide_nodes,
    is_communication,
    is_out_of_memory,
    is_waiting,
    place_of,
)
from harness.ranks.node_report import Death, Halt, NodeReport
from harness.ranks.rank_report import RankReport
from harness.records.record import Failure

CLOSED = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:6019"
)


def _report(rank: int, state: str, *, time: float = 0.0, phase: str = "parity", **fields: Any) -> RankReport:
    return RankReport(rank=rank, state=state, phase=phase, time=time, **fields)


def _ok(rank: int) -> RankReport:
    return _report(rank, "ok", result={"rank": rank})


def _running(rank: int, **fields: Any) -> RankReport:
    return _report(rank, "running", **fields)


def _error(rank: int, kind: str, message: str = "", *, time: float) -> RankReport:
    return _report(rank, "error", kind=kind, message=message, time=time)


def _decide(
    reports: list[RankReport],
    deaths: list[Death],
    *,
    ranks: int = 2,
    halt: Halt | None = None,
    waiting: tuple[int, ...] = (),
) -> Outcome:
    """Decide about a trial on one node whose ranks had ended, or were to end, at time 100."""
    return _decide_nodes(reports, [_node(0, deaths, halt=halt, waiting=waiting)], ranks=ranks)


def _decide_nodes(
    reports: list[RankReport], nodes: list[NodeReport], *, ranks: int = 4, hosts: tuple[str, ...] = ("a",)
) -> Outcome:
    return decide_nodes(
        ranks,
        node_reports={node.node_rank: node for node in nodes},
        rank_reports={report.rank: report for report in reports},
        hosts=hosts,
    )


def _node(
    node_rank: int,
    deaths: list[Death] | None = None,
    *,
    halt: Halt | None = None,
    waiting: tuple[int, ...] = (),
    time: float = 100.0,
) -> NodeReport:
    return NodeReport(
        node_rank=node_rank,
        host="a",
        time=time,
        deaths=tuple(deaths or ()),
        halt=halt,
        waiting=waiting,
    )


def _died(rank: int, code: int, time: float, *, ended: bool = False) -> Death:
    return Death(rank=rank, code=code, time=time, ended=ended)


_DEADLINE = Halt(kind="deadline", message="no result within 30 s")
_TIME_LIMIT = Halt(kind="time_limit", message="the time limit of the job was reached")
_PEER = Halt(kind="peer", message="another node has ended its ranks", error_kind="peer")
_TERMINATED = Halt(kind="terminated", message="the lane was told to end", error_kind="SIGTERM")


@pytest.mark.parametrize(
    "deaths",
    [
        pytest.param([_died(0, 0, 1), _died(1, 0, 1)], id="both left in order"),
        pytest.param([_died(0, 0, 1), _died(1, -6, 2)], id="one aborted after its result"),
        pytest.param([_died(0, 0, 1), _died(1, -15, 2, ended=True)], id="one ended after its result"),
    ],
)
def test_results_of_all_ranks_are_ok(deaths: list[Death]) -> None:
    assert _decide([_ok(1), _ok(0)], deaths) == Outcome(status="ok", results=({"rank": 0}, {"rank": 1}))


@pytest.mark.parametrize(
    ("reports", "deaths", "status", "kind", "rank"),
    [
        pytest.param(
            [_error(0, "ValueError", time=2), _error(1, "KeyError", time=1)],
            [],
            "failed",
            "KeyError",
            1,
            id="the earlier of two exceptions",
        ),
        pytest.param(
            [_error(0, "RuntimeError", CLOSED, time=1), _error(1, "ValueError", time=2)],
            [],
            "failed",
            "ValueError",
            1,
            id="an exception against an earlier communication error",
        ),
        pytest.param(
            [_error(0, "DistBackendError", "NCCL error", time=1), _running(1)],
            [_died(1, -9, 3)],
            "failed",
            "SIGKILL",
            1,
            id="a signal against an earlier communication error",
        ),
        pytest.param(
            [_error(0, "OutOfMemoryError", "CUDA out of memory", time=2), _running(1)],
            [_died(1, -6, 3)],
            "oom",
            "OutOfMemoryError",
            0,
            id="out of memory against a later abort",
        ),
        pytest.param(
            [_running(0), _running(1)],
            [_died(0, -15, 2, ended=True), _died(1, 5, 1)],
            "failed",
            "exit 5",
            1,
            id="an exit against a rank that was ended for it",
        ),
        pytest.param(
            [_ok(0), _running(1)], [_died(1, 0, 1)], "failed", "exit 0", 1, id="an exit without a result"
        ),
        pytest.param(
            [_error(0, "StrategyError", "ac.labels: no", time=1), _running(1)],
            [],
            "refused",
            "StrategyError",
            0,
            id="what a strategy finds in forward",
        ),
        pytest.param(
            [_error(0, "InfeasibleBudget", "chunk.budget_mib: no", time=1), _running(1)],
            [],
            "refused",
            "InfeasibleBudget",
            0,
            id="a budget that the kernels of this device do not keep",
        ),
        pytest.param([], [_died(0, -11, 1)], "failed", "SIGSEGV", 0, id="a death before the first report"),
        pytest.param(
            [_running(0)], [_died(0, -36, 1)], "failed", "signal 36", 0, id="a signal without a name"
        ),
        pytest.param(
            [_error(0, "RuntimeError", CLOSED, time=2), _error(1, "RuntimeError", CLOSED, time=1)],
            [],
            "failed",
            "RuntimeError",
            1,
            id="the earlier of nothing but communication errors",
        ),
    ],
)
def test_the_cause_is(
    reports: list[RankReport], deaths: list[Death], status: str, kind: str, rank: int
) -> None:
    outcome = _decide(reports, deaths)
    assert outcome.error is not None
    assert (outcome.status, outcome.error.kind, outcome.error.rank) == (status, kind, rank)
    assert outcome.error.log == f"rank{rank}.log"
    assert outcome.results == ()


@pytest.mark.parametrize(
    ("reports", "waiting", "rank", "message"),
    [
        pytest.param(
            [_running(0, phase="parity"), _running(1, phase="build")],
            (),
            1,
            "no result within 30 s; rank 1 is in phase build, silent for 100.0 s",
            id="the phase furthest behind",
        ),
        pytest.param(
            [_running(0, done=3, total=10), _running(1, done=2, total=10)],
            (),
            1,
            "no result within 30 s; rank 1 is in phase parity, step 2 of 10, silent for 100.0 s",
            id="the step furthest behind",
        ),
        pytest.param(
            [_running(0, time=70), _running(1, time=40)],
            (),
            1,
            "no result within 30 s; rank 1 is in phase parity, silent for 60.0 s",
            id="the oldest heartbeat",
        ),
        pytest.param(
            [_running(0, time=40), _running(1, time=70)],
            (0,),
            1,
            "no result within 30 s; rank 1 is in phase parity, silent for 30.0 s",
            id="the one that does not wait",
        ),
        pytest.param(
            [_running(0)],
            (),
            1,
            "no result within 30 s; rank 1 never reported",
            id="the one that never reported",
        ),
        pytest.param(
            [_ok(0), _running(1)],
            (),
            1,
            "no result within 30 s; rank 1 is in phase parity, silent for 100.0 s",
            id="the one without a result",
        ),
        pytest.param(
            [_error(0, "RuntimeError", CLOSED, time=1), _running(1)],
            (),
            1,
            "no result within 30 s; rank 1 is in phase parity, silent for 100.0 s",
            id="the silent one against a communication error",
        ),
    ],
)
def test_out_of_time_names(
    reports: list[RankReport], waiting: tuple[int, ...], rank: int, message: str
) -> None:
    deaths = [_died(0, -15, 101, ended=True), _died(1, -15, 101, ended=True)]
    outcome = _decide(reports, deaths, halt=_DEADLINE, waiting=waiting)
    assert outcome.status == "timeout"
    assert outcome.error is not None
    said = f"{message}; a larger protocol.deadline_s gives it more time"
    assert (outcome.error.kind, outcome.error.rank, outcome.error.message) == ("timeout", rank, said)


def test_an_own_failure_wins_against_the_deadline() -> None:
    outcome = _decide(
        [_error(0, "ValueError", time=99), _running(1)],
        [_died(1, -15, 101, ended=True)],
        halt=_DEADLINE,
    )
    assert outcome.error is not None
    assert (outcome.status, outcome.error.kind) == ("failed", "ValueError")


def test_an_end_without_any_cause_is_lost() -> None:
    outcome = _decide([_running(0)], [_died(0, -15, 1, ended=True)], ranks=1)
    message = "the ranks ended without a report and without a cause"
    assert outcome == Outcome(status="lost", error=Failure(kind="lost", message=message))


@pytest.mark.parametrize(
    ("halt", "deaths", "status", "kind", "message"),
    [
        pytest.param(
            _TIME_LIMIT,
            [_died(0, -15, 101, ended=True)],
            "timeout",
            "timeout",
            "the time limit of the job was reached; rank 0 is in phase parity, silent for 60.0 s",
            id="time of the job",
        ),
        pytest.param(
            _TIME_LIMIT,
            [_died(0, -12, 100)],
            "timeout",
            "timeout",
            "the time limit of the job was reached; rank 0 is in phase parity, silent for 60.0 s",
            id="time of the job, of which the rank heard first",
        ),
        pytest.param(
            _TERMINATED,
            [_died(0, -15, 101, ended=True)],
            "lost",
            "SIGTERM",
            "the lane was told to end",
            id="a signal",
        ),
        pytest.param(
            _TERMINATED,
            [_died(0, -15, 100)],
            "lost",
            "SIGTERM",
            "the lane was told to end",
            id="a signal, of which the rank heard first",
        ),
        pytest.param(
            _TERMINATED,
            [_died(0, -9, 99)],
            "failed",
            "SIGKILL",
            "rank 0 was killed by SIGKILL; the kernel sends it when memory is exhausted",
            id="a signal after a death of another",
        ),
        pytest.param(
            None,
            [_died(0, -15, 100)],
            "failed",
            "SIGTERM",
            "rank 0 was killed by SIGTERM",
            id="nothing, though a rank was told to end",
        ),
        pytest.param(
            _PEER,
            [_died(0, -15, 101, ended=True)],
            "lost",
            "peer",
            "another node has ended its ranks",
            id="a peer that nobody knows",
        ),
    ],
)
def test_what_ends_a_node_is(
    halt: Halt | None, deaths: list[Death], status: str, kind: str, message: str
) -> None:
    error = _decide([_running(0, time=40)], deaths, ranks=1, halt=halt)
    assert error.error is not None
    assert (error.status, error.error.kind, error.error.message) == (status, kind, message)


def _closed(rank: int, time: float) -> RankReport:
    return _error(rank, "RuntimeError", CLOSED, time=time)


_TWO = ("alpha", "beta")
_LOST_BETA = ("lost", "lost", None, "the agent of node 1 (beta) left no report")


@pytest.mark.parametrize(
    ("reports", "nodes", "expected"),
    [
        pytest.param(
            [_closed(0, 1), _closed(1, 1), _error(2, "ValueError", "odd", time=2), _closed(3, 3)],
            [_node(0), _node(1)],
            ("failed", "ValueError", 2, "odd"),
            id="an exception against communication errors on both nodes",
        ),
        pytest.param(
            [_closed(0, 1), _closed(1, 1), _running(2), _closed(3, 3)],
            [_node(0), _node(1, [_died(2, -11, 2)])],
            ("failed", "SIGSEGV", 2, "rank 2 was killed by SIGSEGV"),
            id="a death on the other node",
        ),
        pytest.param(
            [
                _error(0, "KeyError", "b", time=5),
                _running(1),
                _running(2),
                _error(3, "ValueError", "a", time=4),
            ],
            [_node(0), _node(1)],
            ("failed", "ValueError", 3, "a"),
            id="the earlier of two nodes that failed at once",
        ),
        pytest.param(
            [
                _error(0, "KeyError", "b", time=5),
                _running(1),
                _running(2),
                _error(3, "ValueError", "a", time=1),
            ],
            [_node(0), _node(1, halt=_PEER)],
            ("failed", "KeyError", 0, "b"),
            id="the node that was not asked to end, whatever the clocks say",
        ),
        pytest.param(
            [_error(0, "OutOfMemoryError", "CUDA out of memory", time=5), _running(1)],
            [_node(0, halt=_PEER), _node(1, [_died(2, 5, 1)])],
            ("failed", "exit 5", 2, "rank 2 exited with status 5 and without a result"),
            id="a death against an exception of a node that was asked to end",
        ),
        pytest.param(
            [_closed(0, 1), _closed(1, 1), _running(2), _running(3)],
            [_node(0)],
            _LOST_BETA,
            id="a node without a report against communication errors",
        ),
        pytest.param(
            [_running(rank) for rank in range(4)],
            [_node(0, halt=_DEADLINE, waiting=(0,))],
            _LOST_BETA,
            id="a node without a report against the deadline",
        ),
        pytest.param(
            [_error(0, "ValueError", "odd", time=9), _running(1), _running(2), _running(3)],
            [_node(0)],
            ("failed", "ValueError", 0, "odd"),
            id="an exception against a node without a report",
        ),
        pytest.param(
            [_closed(0, 1), _running(1), _error(2, "MemoryError", "", time=1), _running(3)],
            [_node(0)],
            ("oom", "MemoryError", 2, ""),
            id="what a rank could write against its node that left no report",
        ),
        pytest.param(
            [_closed(0, 1), _closed(1, 1), _running(2), _running(3)],
            [_node(0), _node(1, [_died(2, -15, 1), _died(3, -15, 1)], halt=_TERMINATED)],
            ("lost", "SIGTERM", None, "the lane was told to end"),
            id="a node that was ended against communication errors",
        ),
        pytest.param(
            [_running(rank) for rank in range(4)],
            [_node(0, halt=_TERMINATED)],
            ("lost", "SIGTERM", None, "the lane was told to end"),
            id="a node that was ended against one without a report",
        ),
        pytest.param(
            [_closed(0, 1), _running(1), _ok(2), _ok(3)],
            [_node(0, halt=_PEER, waiting=(1,)), _node(1)],
            ("failed", "RuntimeError", 0, CLOSED),
            id="nothing but a communication error",
        ),
        pytest.param(
            [_running(rank) for rank in range(4)],
            [_node(0, halt=_PEER), _node(1, halt=_PEER)],
            ("lost", "peer", None, "another node has ended its ranks"),
            id="nobody who knows why",
        ),
        pytest.param(
            [], [], ("lost", "lost", None, "the agent of node 0 (alpha) left no report"), id="nobody"
        ),
    ],
)
def test_the_cause_on_two_nodes_is(
    reports: list[RankReport], nodes: list[NodeReport], expected: tuple[str, str, int | None, str]
) -> None:
    outcome = _decide_nodes(reports, nodes, hosts=_TWO)
    assert outcome.error is not None
    error = outcome.error
    assert (outcome.status, error.kind, error.rank, error.message) == expected


@pytest.mark.parametrize(
    ("reports", "nodes", "rank", "message"),
    [
        pytest.param(
            [_running(0), _running(1), _running(2), _running(3)],
            [_node(0, halt=_DEADLINE, waiting=(0, 1)), _node(1, halt=_PEER, waiting=(2,), time=50)],
            3,
            "no result within 30 s; rank 3 is in phase parity, silent for 50.0 s",
            id="the one that does not wait, on the node that was asked to end",
        ),
        pytest.param(
            [_running(0), _running(1), _closed(2, 1), _closed(3, 1)],
            [_node(0, halt=_DEADLINE, waiting=(1,)), _node(1, halt=_PEER)],
            0,
            "no result within 30 s; rank 0 is in phase parity, silent for 100.0 s",
            id="the one that does not wait, of two whose peers lost them",
        ),
        pytest.param(
            [_running(0, time=90), _running(1, time=90), _running(2, time=5000), _running(3, time=5095)],
            [_node(0, halt=_DEADLINE), _node(1, halt=_DEADLINE, time=5100)],
            2,
            "no result within 30 s; rank 2 is in phase parity, silent for 100.0 s",
            id="the one silent for longest, each by its own clock",
        ),
        pytest.param(
            [_running(0), _running(1), _running(2)],
            [_node(0, halt=_PEER), _node(1, halt=_TIME_LIMIT)],
            3,
            "the time limit of the job was reached; rank 3 never reported",
            id="the one that never reported",
        ),
    ],
)
def test_out_of_time_on_two_nodes_names(
    reports: list[RankReport], nodes: list[NodeReport], rank: int, message: str
) -> None:
    outcome = _decide_nodes(reports, nodes, hosts=_TWO)
    assert outcome.status == "timeout"
    assert outcome.error is not None
    said = message + ("; a larger protocol.deadline_s gives it more time" if "no result" in message else "")
    assert (outcome.error.kind, outcome.error.rank, outcome.error.message) == ("timeout", rank, said)


@pytest.mark.parametrize(
    ("reports", "phase"),
    [
        pytest.param([], "build", id="nothing"),
        pytest.param([_running(2, phase="instrument")], "instrument", id="one rank's report"),
        pytest.param(
            [_running(2, phase="parity"), _running(3, phase="instrument"), _running(0, phase="timing")],
            "parity",
            id="its furthest rank",
        ),
    ],
)
def test_a_lost_node_was_in_the_phase_of(reports: list[RankReport], phase: str) -> None:
    outcome = _decide_nodes(reports, [_node(0)], hosts=_TWO)
    assert outcome.error is not None
    assert (outcome.error.kind, outcome.error.phase, outcome.error.log) == ("lost", phase, None)


@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param([_node(0)], id="though a node left no report"),
        pytest.param([_node(0), _node(1, halt=_TERMINATED)], id="though a node was ended"),
        pytest.param([_node(0, [_died(0, -6, 1)]), _node(1)], id="though a process aborted"),
    ],
)
def test_results_of_all_nodes_are_ok(nodes: list[NodeReport]) -> None:
    reports = [_ok(rank) for rank in (3, 2, 1, 0)]
    expected = Outcome(status="ok", results=tuple({"rank": rank} for rank in range(4)))
    assert _decide_nodes(reports, nodes, hosts=_TWO) == expected


def test_reports_of_ranks_that_the_trial_does_not_have_count_for_nothing() -> None:
    reports = [_ok(0), _ok(1), _error(2, "ValueError", time=0)]
    assert _decide(reports, []).status == "ok"


@pytest.mark.parametrize(
    ("kind", "message", "expected"),
    [
        ("OutOfMemoryError", "", "memory"),
        ("MemoryError", "", "memory"),
        ("_ArrayMemoryError", "Unable to allocate 8.00 EiB", "memory"),
        (
            "RuntimeError",
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes",
            "memory",
        ),
        ("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`", "memory"),
        ("DistBackendError", "NCCL error: Cuda failure 2 'out of memory'", "memory"),
        ("RuntimeError", CLOSED, "communication"),
        (
            "RuntimeError",
            "gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms",
            "communication",
        ),
        ("DistNetworkError", "The client socket has timed out", "communication"),
        ("DistStoreError", "wait timeout after 1000ms", "communication"),
        ("RuntimeError", "Wait timeout", "communication"),
        ("ValueError", "Connection closed by peer", "own"),
        ("ConnectionResetError", "Connection reset by peer", "own"),
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied", "own"),
    ],
    ids=lambda value: value[:40] or "no message",
)
def test_exceptions_are_told_apart(kind: str, message: str, expected: str) -> None:
    is_memory, is_echo = is_out_of_memory(kind, message), is_communication(kind, message)
    assert (is_memory, is_echo) == (expected == "memory", expected == "communication")


_WAITING = """Thread 0x00007f (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007e (most recent call first):
  File "/venv/torch/distributed/distributed_c10d.py", line 2972 in all_reduce
  File "/venv/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/project/model.py", line 3 in forward
"""
_IN_FUNCTIONAL_COLLECTIVE = """Current thread 0x00007e (most recent call first):
  File "/venv/torch/_ops.py", line 882 in redispatch
  File "/venv/torch/_library/autograd.py", line 41 in forward_no_grad
  File "/project/model.py", line 7 in forward
  File "/venv/torch/autograd/graph.py", line 865 in _engine_run_backward
"""
_ASLEEP = """Thread 0x00007f (most recent call first):
  File "/venv/torch/distributed/distributed_c10d.py", line 2972 in all_reduce

Current thread 0x00007e (most recent call first):
  File "/project/model.py", line 3 in forward
  File "/venv/torch/nn/modules/module.py", line 1776 in _call_impl
  File "/venv/torch/nn/modules/module.py", line 1765 in _wrapped_call_impl
  File "/venv/torch/distributed/fsdp/_fully_shard/_fsdp_state.py", line 10 in forward
"""
_IN_ENGINE = """Current thread 0x00007e (most recent call first):
  File "/venv/torch/autograd/graph.py", line 865 in _engine_run_backward
  File "/venv/torch/autograd/__init__.py", line 356 in backward
"""
_IN_BACKWARD_OF_THE_MODEL = """Current thread 0x00007e (most recent call first):
  File "/project/model.py", line 9 in backward
  File "/venv/torch/autograd/function.py", line 315 in apply
  File "/venv/torch/autograd/graph.py", line 865 in _engine_run_backward
"""


@pytest.mark.parametrize(
    ("stack", "expected"),
    [
        pytest.param(_WAITING, True, id="in a collective"),
        pytest.param(_IN_FUNCTIONAL_COLLECTIVE, True, id="in a collective that is an operator"),
        pytest.param(_IN_ENGINE, True, id="in the autograd engine, where DDP waits"),
        pytest.param(_IN_BACKWARD_OF_THE_MODEL, False, id="in a backward of the model"),
        pytest.param(_ASLEEP, False, id="in the model, though another thread communicates"),
        pytest.param(
            '  File "/venv/torch/distributed/x.py", line 1 in f', False, id="no stack, only a line like one"
        ),
        pytest.param("", False, id="nothing"),
    ],
)
def test_a_stack_tells_who_waits(stack: str, expected: bool) -> None:
    assert is_waiting(stack) is expected


@pytest.mark.parametrize(
    ("stack", "place"),
    [
        pytest.param(_WAITING, "waits in all_reduce, called by forward (model.py, line 3)", id="in forward"),
        pytest.param(
            _IN_FUNCTIONAL_COLLECTIVE,
            "waits in a collective, called by forward (model.py, line 7) of backward",
            id="recomputing",
        ),
        pytest.param(_ASLEEP, "is in forward (model.py, line 3)", id="in the model"),
        pytest.param(_IN_ENGINE, "", id="in torch alone"),
        pytest.param("", "", id="nothing"),
    ],
)
def test_a_stack_tells_where_a_rank_is(stack: str, place: str) -> None:
    assert place_of(stack) == place


_IN_F, _IN_G = "rank 0 waits in send, called by f", "rank 1 waits in wait, called by g"
_MORE_TIME = "; a larger protocol.deadline_s gives it more time"


@pytest.mark.parametrize(
    ("waiting", "places", "says"),
    [
        pytest.param(
            (0, 1),
            (_IN_F, _IN_G),
            f"; every rank waits for others, which more time does not help: {_IN_F}; {_IN_G}",
            id="all, who began other collectives",
        ),
        pytest.param(
            (0, 1),
            ("rank 0 is in f of backward", _IN_G),
            f"; rank 0 is in f of backward; {_IN_G}{_MORE_TIME}",
            id="all, or a slow backward",
        ),
        pytest.param(
            (0, 1),
            (_IN_F, _IN_F.replace("0", "1")),
            f"; {_IN_F}; {_IN_F.replace('0', '1')}{_MORE_TIME}",
            id="all, in one collective that may be slow",
        ),
        pytest.param((0,), (_IN_F, "rank 1 is in g"), _MORE_TIME, id="one, for the other"),
    ],
)
def test_ranks_that_all_wait_say_where(waiting: tuple[int, ...], places: tuple[str, ...], says: str) -> None:
    node = replace(_node(0, halt=_DEADLINE, waiting=waiting), places=places)
    outcome = _decide_nodes([_running(0), _running(1)], [node], ranks=2)
    assert outcome.error is not None
    assert outcome.error.message.endswith(f"silent for 100.0 s{says}")
