"""Records of a sweep fit into one file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from docs.tools import records


@pytest.mark.parametrize(
    "names", [pytest.param([], id="none is an error"), pytest.param(["b", "a"], id="in order")]
)
def test_gathers_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_text(json.dumps({"trial_id": name}), "utf-8")
    out = tmp_path / "all" / "records.json"
    monkeypatch.setattr(sys, "argv", ["records", str(tmp_path), "--out", str(out)])
    assert records.main() == int(not names)
    assert [record["trial_id"] for record in json.loads(out.read_text("utf-8"))] == sorted(names)
