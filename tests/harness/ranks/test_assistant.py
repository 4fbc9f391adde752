"""Functions that a fork of the fork server calls for the driver."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.errors import ConfigError, Terminated
from harness.ranks import agent as agents
from harness.ranks.agent import Agent
from harness.ranks.assistant import Assistant, AssistantEndedError
from harness.ranks.forkserver import ForkServer, ForkServerError
from harness.ranks.start import RankJob
from tests.harness import assistant_calls, rank_entries
from tests.harness.processes import require_dead

CALLS = assistant_calls.__name__


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer((CALLS,))
    yield server
    server.close()


@pytest.fixture
def assistant(server: ForkServer) -> Iterator[Assistant]:
    assistant = Assistant(server)
    yield assistant
    assistant.close()


def test_returns_what_functions_return_in_one_other_process(assistant: Assistant) -> None:
    assert assistant.call(f"{CALLS}:product", 6, 7) == 42
    first, second = (assistant.call(f"{CALLS}:pid") for _ in range(2))
    assert first == second != os.getpid()


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("refusal", ConfigError, "mesh.tp: must be 1"),
        ("defect", ZeroDivisionError, "by zero"),
        ("termination", Terminated, "143"),
        ("stubborn", RuntimeError, "_Stubborn: 12"),
    ],
)
def test_raises_what_a_function_raises(
    assistant: Assistant, kind: str, error: type[BaseException], message: str
) -> None:
    with pytest.raises(error) as caught:
        assistant.call(f"{CALLS}:fails", kind)
    assert message in str(caught.value)
    assert "in fails" in "".join((str(caught.value), *getattr(caught.value, "__notes__", ())))
    assert assistant.call(f"{CALLS}:product", 2, 3) == 6


@pytest.mark.parametrize(
    ("function", "ending"),
    [
        ("dies", "was ended by SIGKILL"),
        ("exits", "exited with status 0"),
        ("closes_everything", "exited with status 1"),
        ("writes_everywhere", "gave no answer that can be read (UnpicklingError)"),
    ],
)
def test_the_end_of_the_process_is_an_error_that_says_how(
    server: ForkServer, function: str, ending: str
) -> None:
    with pytest.raises(AssistantEndedError) as ended:
        Assistant(server).call(f"{CALLS}:{function}")
    message = f"{CALLS}:{function}: the process that called it {ending}"
    assert (str(ended.value), ended.value.ending) == (message, ending)


def test_a_fork_of_the_process_does_not_answer_for_it(assistant: Assistant) -> None:
    assert assistant.call(f"{CALLS}:forks") > 0
    assert assistant.call(f"{CALLS}:product", 6, 7) == 42


def test_a_fork_server_that_somebody_ends_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "PRELOAD", ())  # two servers that import torch take five seconds
    with Agent((CALLS,)) as agent:
        assert agent.call(f"{CALLS}:ends_its_server", str(tmp_path / "ended")) == 42


def test_a_function_that_takes_too_long_is_killed(server: ForkServer) -> None:
    assistant = Assistant(server)
    other = assistant.call(f"{CALLS}:pid")
    with pytest.raises(ForkServerError, match=r"sleeps: did not return within 0\.1 s$"):
        assistant.call(f"{CALLS}:sleeps", deadline_s=0.1)
    assistant.close()
    require_dead(other)


def test_is_gone_before_ranks_begin(tmp_path: Path) -> None:
    with Agent() as agent:
        first = agent.call("os:getpid")
        assert agent.call("os:getpid") == first
        job = RankJob(
            trial_dir=tmp_path, entry=f"{rank_entries.__name__}:ok", payload=1, ranks=1, deadline_s=120.0
        )
        assert agent.run(job).status == "ok"
        require_dead(first)
        second = agent.call("os:getpid")
        assert second != first
    require_dead(second)
