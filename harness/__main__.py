"""`acbench`, also `python -m harness`, and its sisters; they import torch only where it is needed."""

from __future__ import annotations

import importlib

from harness import deferred
from hydra_plugins.acbench.entry import ended_by_its_reader, require_ours


def main() -> None:
    """Run `acbench` and leave with its status."""
    _run("acbench", "harness.command_line.cli", "main")


def plan() -> None:
    """Run `acbench-plan` and leave with its status."""
    _run("acbench-plan", "harness.command_line.cli", "plan")


def calibrate() -> None:
    """Run `acbench-calibrate` and leave with its status."""
    _run("acbench-calibrate", "harness.predict.this_cpu", "main")


def fit() -> None:
    """Run `acbench-fit` and leave with its status."""
    require_ours("acbench-fit")
    importlib.import_module("harness.command_line.fit_command").main()


def _run(command: str, module: str, function: str) -> None:
    require_ours(command)
    deferred.install()
    getattr(importlib.import_module(module), function)()


if __name__ == "__main__":
    with ended_by_its_reader():
        main()
