"""What has passed is noted and skipped; what failed or stands elsewhere is not, nor what runs by default."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.resuming import Resuming

ROW = "tests/matrix/test_a.py::test_b[c]"


def _report(**changes: Any) -> Any:
    said = {"nodeid": ROW, "when": "call", "passed": True}
    return SimpleNamespace(**(said | changes))


@pytest.mark.parametrize(
    ("report", "noted"),
    [
        pytest.param(_report(), [ROW], id="a row that passed"),
        pytest.param(_report(passed=False), [], id="one that failed"),
        pytest.param(_report(when="setup"), [], id="one that was only set up"),
        pytest.param(_report(nodeid="tests/parity/test_a.py::test_b"), [], id="a test of another folder"),
    ],
)
def test_what_passed_is_noted(report: Any, noted: list[str], tmp_path: Path) -> None:
    path = tmp_path / "matrix" / "here.txt"
    Resuming(path).pytest_runtest_logreport(report)
    assert (path.read_text("utf-8").splitlines() if path.exists() else []) == noted


@pytest.mark.parametrize(
    ("nodeid", "marks", "is_skipped"),
    [
        pytest.param(ROW, {"matrix"}, True, id="a row that passed"),
        pytest.param(ROW, set(), False, id="a row that runs by default"),
        pytest.param(f"{ROW}d", {"matrix"}, False, id="another row"),
    ],
)
def test_what_has_passed_is_skipped(nodeid: str, marks: set[str], is_skipped: bool, tmp_path: Path) -> None:
    path = tmp_path / "here.txt"
    path.write_text(f"{ROW}\n", encoding="utf-8")
    added: list[Any] = []
    item: Any = SimpleNamespace(
        nodeid=nodeid, add_marker=added.append, get_closest_marker=lambda name: name in marks
    )
    Resuming(path).pytest_collection_modifyitems([item])
    assert [mark.name for mark in added] == ["skip"] * is_skipped
