"""What is asked of a model before its trial, in a process that has imported torch."""

from __future__ import annotations

from typing import Any

from harness.sweep.planning_log import planning_shown
from harness.trial import preflight


def refusal(*arguments: Any) -> preflight.Refusal:
    """Return what `preflight.built_refusal` returns, and write meanwhile what strategies log to stderr."""
    with planning_shown():
        return preflight.built_refusal(*arguments)
