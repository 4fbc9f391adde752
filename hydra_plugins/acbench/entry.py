"""The commands, in a namespace package: no folder of a user hides it, and it can say which hides another."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import PathFinder
from pathlib import Path

_PACKAGES = ("harness", "strategies")


def main() -> None:
    """Run `acbench` and leave with its status."""
    require_ours("acbench")  # before anything of ours is imported
    importlib.import_module("harness.__main__").main()


def report() -> None:
    """Run `acbench-report` and leave with its status."""
    require_ours("acbench-report")
    sys.exit(importlib.import_module("harness.report.main").main())


def folder_hiding(package: str) -> Path | None:
    """Return the folder that Python takes for a package of ours; `None` where it takes ours."""
    spec = PathFinder.find_spec(package)
    folders = [] if spec is None else [Path(each) for each in spec.submodule_search_locations or ()]
    ours = Path(__file__).resolve().parents[2] / package
    return next((folder for folder in folders[:1] if folder.resolve() != ours), None)


def require_ours(command: str) -> None:
    """Leave with a message where a folder of the user hides a package of ours."""
    hiding = next((folder for folder in map(folder_hiding, _PACKAGES) if folder is not None), None)
    if hiding is not None:
        sys.stderr.write(
            f"{command}: {hiding} hides a package of acbench with the same name, because it comes first on "
            "Python's path; rename the folder, or start the command from another one\n"
        )
        sys.exit(2)
