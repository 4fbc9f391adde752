"""`acbench`, also `python -m harness`: the command line, which imports torch only to plan with it."""

from __future__ import annotations

import importlib

from harness import deferred
from hydra_plugins.acbench.entry import ended_by_its_reader, require_ours


def main() -> None:
    """Run the command of this process and leave with its status."""
    require_ours("acbench")
    deferred.install()
    importlib.import_module("harness.cli").main()


if __name__ == "__main__":
    with ended_by_its_reader():
        main()
