"""`acbench`, also `python -m harness`: the command line, which imports torch only to plan with it."""

from __future__ import annotations

import importlib

from harness import deferred


def main() -> None:
    """Run the command of this process and leave with its status."""
    deferred.install()
    importlib.import_module("harness.cli").main()


if __name__ == "__main__":
    main()
