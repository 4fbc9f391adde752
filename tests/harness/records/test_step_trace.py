"""A kept step is read as it was written, or refused by what is wrong with it."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.records.step_trace import read_steps, write_step
from tests.harness.step_fixture import STEP


def test_steps_are_read_by_rank(tmp_path: Path) -> None:
    folder = tmp_path / "sweep" / "trial"
    folder.mkdir(parents=True)
    for rank in (10, 2):
        write_step(replace(STEP, rank=rank), folder)
    (folder / "stepped.json.gz").write_bytes(b"")
    assert read_steps(folder) == [replace(STEP, rank=2), replace(STEP, rank=10)]
    assert read_steps(tmp_path) == []


def test_totals_are_those_of_the_device_or_of_the_host() -> None:
    assert list(STEP.totals()) == [100, 140, 140, 100, 160, 60]
    assert list(STEP.totals(on_host=True)) == [0, 0, 8, 8, 8, 8]


def _changed(**changed: Any) -> bytes:
    value = {
        "version": 1, "rank": 0, "start": STEP.start, "storages": STEP.storages, "changes": STEP.changes,
        "operators": STEP.operators,
    }  # fmt: skip
    return gzip.compress(json.dumps(value | changed).encode())


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        pytest.param(_changed()[:40], "Compressed file ended", id="torn"),
        pytest.param(b"{}", "Not a gzipped file", id="another format"),
        pytest.param(gzip.compress(b"[]"), "list indices", id="no object"),
        pytest.param(_changed(version=2), "this acbench reads version 1", id="a later version"),
        pytest.param(
            _changed(changes=[[9, 1, 0]]), "a storage that it does not describe", id="unknown storage"
        ),
        pytest.param(
            _changed(changes=[[0, "1", 0]]), "among its rows of TracedChange", id="a word for a number"
        ),
        pytest.param(_changed(operators=[["mm"]]), "among its rows of TracedOperator", id="a short row"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    file = tmp_path / "step0.json.gz"
    file.write_bytes(content)
    with pytest.raises(ValueError, match="is no trace of a step") as raised:
        read_steps(tmp_path)
    assert str(raised.value).startswith(f"{file}: ")
    assert problem in str(raised.value)
