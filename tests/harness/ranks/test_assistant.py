"""Functions that a fork of the fork server calls for the driver."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from harness.errors import ConfigError, Terminated
from harness.ranks.agent import Agent
from harness.ranks.assistant import Assistant
from harness.ranks.forkserver import ForkServer, ForkServerError
from harness.ranks.start import RankJob
from tests.harness import rank_entries
from tests.harness.processes import require_dead


class _Stubborn(Exception):  # noqa: N818 (nobody sees it)
    """Pickles, but cannot be made again."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(one + other)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer((__name__,))
    yield server
    server.close()


@pytest.fixture
def assistant(server: ForkServer) -> Iterator[Assistant]:
    assistant = Assistant(server)
    yield assistant
    assistant.close()


def product(one: int, other: int) -> int:
    return one * other


def pid() -> int:
    return os.getpid()


def fails(kind: str) -> NoReturn:
    errors: dict[str, BaseException] = {
        "refusal": ConfigError("mesh.tp", "must be 1"),
        "defect": ZeroDivisionError("by zero"),
        "termination": Terminated(143),
        "stubborn": _Stubborn("1", "2"),
    }
    raise errors[kind]


def dies() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
    raise AssertionError


def test_returns_what_functions_return_in_one_other_process(assistant: Assistant) -> None:
    assert assistant.call(f"{__name__}:product", 6, 7) == 42
    first, second = (assistant.call(f"{__name__}:pid") for _ in range(2))
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
        assistant.call(f"{__name__}:fails", kind)
    assert message in str(caught.value)
    assert "in fails" in "".join((str(caught.value), *getattr(caught.value, "__notes__", ())))
    assert assistant.call(f"{__name__}:product", 2, 3) == 6


def test_a_death_is_an_error(assistant: Assistant) -> None:
    with pytest.raises(ForkServerError, match=r"test_assistant:dies: the process that called it has ended$"):
        assistant.call(f"{__name__}:dies")


def sleeps() -> None:
    signal.pause()


def test_a_function_that_takes_too_long_is_killed(server: ForkServer) -> None:
    assistant = Assistant(server)
    other = assistant.call(f"{__name__}:pid")
    with pytest.raises(ForkServerError, match=r"sleeps: did not return within 0\.1 s$"):
        assistant.call(f"{__name__}:sleeps", deadline_s=0.1)
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
