"""Checks in another process: the same refusals, and what strategies say meanwhile."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from harness.sweep import checks, planning_log
from harness.trial import preflight, without_memory
from strategies import StrategyError
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
