"""A run of `tests/matrix` goes on where the last one ended: what has passed is skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.measure.environment import environment_id, identity

ROOT = Path(__file__).parents[1]
RESUMED = "tests/matrix/"
_MADE_OF = ("tests/matrix", "tests/gallery", "bench")
"""What these tests are made of, beside the sources that an environment is known by."""


class Resuming:
    """Notes which tests of `tests/matrix` have passed, and skips those marked `matrix` next time.

    Args:
        path: the file of this environment.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._passed = set(path.read_text("utf-8").splitlines()) if path.exists() else set()

    @pytest.hookimpl(trylast=True)  # the marks are there
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if item.nodeid in self._passed and item.get_closest_marker("matrix"):
                item.add_marker(
                    pytest.mark.skip(reason=f"has passed, says {self._path}; --fresh runs it again")
                )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        is_here = report.nodeid.startswith(RESUMED)
        if is_here and report.when == "call" and report.passed:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{report.nodeid}\n")


def resuming(config: pytest.Config) -> Resuming:
    """Return the plugin of a run; with `--fresh` nothing has passed before."""
    code = [path for folder in _MADE_OF for path in sorted((ROOT / folder).rglob("*.py"))]
    name = environment_id(identity(config.getoption("device"), code))
    path = ROOT / "outputs" / "matrix" / f"{name}.txt"
    if config.getoption("fresh"):
        path.unlink(missing_ok=True)
    return Resuming(path)
