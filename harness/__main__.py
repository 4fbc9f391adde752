"""`acbench`, also `python -m harness`: the command line, which imports torch only to plan with it."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from harness import deferred


def main() -> None:
    """Run the command of this process and leave with its status."""
    hiding = folder_hiding("strategies")
    if hiding is not None:
        sys.stderr.write(
            f"acbench: {hiding} hides a package of acbench with the same name, because it comes first on "
            "Python's path; rename the folder, or start the command from another one\n"
        )
        sys.exit(2)
    deferred.install()
    importlib.import_module("harness.cli").main()


def folder_hiding(package: str) -> Path | None:
    """Return the folder that Python takes for a package of ours; `None` where it takes ours."""
    spec = PathFinder.find_spec(package)
    folders = [] if spec is None else [Path(each) for each in spec.submodule_search_locations or ()]
    ours = Path(__file__).resolve().parents[1] / package
    return next((folder for folder in folders[:1] if folder.resolve() != ours), None)


if __name__ == "__main__":
    main()
