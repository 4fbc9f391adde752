from __future__ import annotations

from typing import Any

import pytest

from harness.culprit import (
    Deadline,
    Death,
    Outcome,
    TrialError,
    decide,
    is_communication,
    is_out_of_memory,
    is_waiting,
)
from harness.rank_report import RankReport

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
    deadline: Deadline | None = None,
) -> Outcome:
    return decide(
        range(ranks), deaths=deaths, reports={report.rank: report for report in reports}, deadline=deadline
    )


def _died(rank: int, code: int, time: float, *, ended: bool = False) -> Death:
    return Death(rank=rank, code=code, time=time, ended=ended)


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
    outcome = _decide(reports, deaths, deadline=Deadline(seconds=30, time=100, waiting=waiting))
    assert outcome.status == "timeout"
    assert outcome.error is not None
    assert (outcome.error.kind, outcome.error.rank, outcome.error.message) == ("timeout", rank, message)


def test_an_own_failure_wins_against_the_deadline() -> None:
    outcome = _decide(
        [_error(0, "ValueError", time=99), _running(1)],
        [_died(1, -15, 101, ended=True)],
        deadline=Deadline(seconds=30, time=100),
    )
    assert outcome.error is not None
    assert (outcome.status, outcome.error.kind) == ("failed", "ValueError")


def test_an_end_without_any_cause_is_lost() -> None:
    outcome = _decide([_running(0)], [_died(0, -15, 1, ended=True)], ranks=1)
    message = "the ranks ended without a report and without a cause"
    assert outcome == Outcome(
        status="lost", error=TrialError(kind="lost", message=message, rank=None, phase=None, log=None)
    )


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
