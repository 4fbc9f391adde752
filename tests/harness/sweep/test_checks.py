"""Checks in another process: the same refusals, and what strategies say meanwhile."""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest
from torch import nn

from harness.errors import ConfigError
from harness.models.python import PythonSpec
from harness.ranks.agent import Agent
from harness.ranks.forkserver import ForkServer
from harness.sweep import checks, planning_log
from harness.trial import preflight, without_memory
from strategies import StrategyError
from tests.forked_servers import forks_of
from tests.harness.composing import experiment_of


def _check(_model: object, refused: str) -> None:
    logging.getLogger("strategies.chunk").info("%s bytes", refused)
    if refused:
        raise StrategyError("ac", refused)


@pytest.mark.parametrize("refused", ["", "no"])
def test_returns_what_a_check_refuses_and_writes_what_is_logged(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], refused: str
) -> None:
    arguments: Any = "check_variant", 60.0, experiment_of("model=mlp").model, refused
    monkeypatch.setattr(without_memory, "check_variant", _check)
    monkeypatch.setattr(planning_log, "PAUSE_S", 0.0)
    found = checks.refusal(*arguments)
    assert capfd.readouterr().err == f"acbench: planning {refused} bytes\n"
    assert str(found) == str(preflight.built_refusal(*arguments)) == ("ac: no" if refused else "None")


class _BadText(Exception):  # noqa: N818 (nobody sees it)
    def __str__(self) -> str:
        raise ValueError("no words")


class _ExitingText(Exception):  # noqa: N818 (nobody sees it)
    def __str__(self) -> NoReturn:
        raise SystemExit(0)


def _raise(error: BaseException) -> NoReturn:
    raise error


def _hang() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    time.sleep(600)


ACTS: dict[str, Callable[[], object]] = {
    "exits_at_once": lambda: os._exit(0),
    "crashes": lambda: ctypes.string_at(0),
    "kills_itself": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "closes_everything": lambda: os.closerange(0, 1024),
    "has_no_text": lambda: _raise(_BadText()),
    "exits_in_its_text": lambda: _raise(_ExitingText()),
    "has_a_long_text": lambda: _raise(ValueError("x" * 50_000_000)),
    "interrupts": lambda: _raise(KeyboardInterrupt()),
    "is_a_generator": lambda: _raise(GeneratorExit("gone")),
    "hangs_deaf": _hang,
}


def make(act: str = "") -> nn.Module:
    """Make a model, or do what ends the process that made it."""
    if act:
        ACTS[act]()
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


@pytest.fixture(scope="module")
def agent(rank_server: ForkServer) -> Iterator[Agent]:
    with forks_of(rank_server), Agent((__name__,)) as agent:
        yield agent


def _spec(act: str = "") -> PythonSpec:
    options = f"model=python model.factory={__name__}:make model.layers_fqn='' model.vocab_size=256"
    spec = experiment_of(options).model if not act else None
    if spec is None:
        spec = PythonSpec(
            name="python", layers_fqn="", vocab_size=256, factory=f"{__name__}:make", tp_column=(), tp_row=(),
            kwargs={"act": act},
        )  # fmt: skip
    assert isinstance(spec, PythonSpec)
    return spec


WHOSE = f"'{__name__}:make'"
ENDED, REMEDY = f"the process that ran {WHOSE}", "a factory returns or raises"


def test_what_another_process_has_seen_of_a_factory_is_known_without_a_call(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And goes wherever the description of the model goes."""
    spec = _spec()
    elsewhere = checks.Elsewhere(agent.call)
    preflight.Preflight(lambda _: True, elsewhere.refusal, elsewhere.made).check(
        experiment_of(f"model=python model.factory={__name__}:make model.layers_fqn=''")
    )
    monkeypatch.setitem(globals(), "make", lambda: os._exit(1))
    seen = pickle.loads(pickle.dumps(spec))
    assert "test_checks.py" in {each.name for each in seen.files()}
    assert not seen.is_reduced()


@pytest.mark.parametrize(
    ("act", "problem"),
    {
        "exits_at_once": f"{ENDED} exited with status 0; {REMEDY}",
        "kills_itself": f"{ENDED} was ended by SIGKILL; {REMEDY}",
        "closes_everything": f"{ENDED} exited with status 1; {REMEDY}",
        "has_no_text": f"{WHOSE} raised _BadText: (its text cannot be had: ValueError)",
        "exits_in_its_text": f"{WHOSE} raised _ExitingText: (its text cannot be had: SystemExit)",
        "has_a_long_text": f"{WHOSE} raised ValueError: {'x' * 4000}",
        "interrupts": f"{WHOSE} raised KeyboardInterrupt: ",
        "is_a_generator": f"{WHOSE} raised GeneratorExit: gone",
        "crashes": f"{ENDED} was ended by SIGSEGV; {REMEDY}",
        "hangs_deaf": f"{WHOSE} did not return within 0.5 s",
    }.items(),
)
def test_nothing_that_a_factory_does_ends_the_driver(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, act: str, problem: str
) -> None:
    monkeypatch.setattr(checks, "_SLACK_S", 0.5 if act == "hangs_deaf" else 60.0)
    deadline_s = 0.5 if act == "hangs_deaf" else 30.0
    found = checks.Elsewhere(agent.call).made(deadline_s, _spec(act))
    assert isinstance(found, ConfigError)
    assert str(found) == f"model.factory: {problem}"
