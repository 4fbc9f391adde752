"""Each silent defect gets the right verdict, and no control raises an alarm."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import detection


def test_every_verdict_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "detection.json"
    monkeypatch.setattr(sys, "argv", ["detection", "--out", str(path)])
    assert detection.main() == 0
    assert capsys.readouterr().out.count(" right ") == len(detection.CASES)
    rows = json.loads(path.read_text("utf-8"))["results"]
    assert [row["verdict"] for row in rows] == [case.expected for case in detection.CASES]
    assert all(row["equal"]["outputs"] and row["equal"]["loss"] for row in rows)
    assert rows[0]["first_difference"].startswith(
        "parity: gradient of 'layers.1.down.weight' differs first at (0, 0) on rank 0 in step 0: "
    )
