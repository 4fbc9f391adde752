"""One odd record never ends a report: it is listed, and the others are shown."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.records.store import RECORD, Store
from harness.report.main import main
from harness.report.odd_records import odd_records
from tests.harness.records_fixture import experiment, record

ODD = "0123456789ab"


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": [value]}
    return value


def _changed(**changes: Any) -> str:
    return json.dumps(record().to_dict() | {"trial_id": ODD} | changes)


def _memory(**changes: Any) -> str:
    value = record().to_dict()
    value["memory"] |= changes
    return json.dumps(value | {"trial_id": ODD})


def _deep_text(depth: int) -> str:
    return _changed(plan=None).replace('"plan": null', '"plan": ' + '{"a": [' * depth + "1" + "]}" * depth)


def _write(text: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(text, encoding="utf-8")

    return write


@pytest.mark.parametrize(
    "put",
    [
        pytest.param(os.mkfifo, id="a pipe"),
        pytest.param(Path.mkdir, id="a folder"),
        pytest.param(lambda path: path.symlink_to(path), id="a link to itself"),
        pytest.param(_write(_memory(peak_bytes=10**30)), id="a huge integer"),
        pytest.param(_write(_changed().replace("1.0", "1" * 5000)), id="an integer of 5000 digits"),
        pytest.param(_write(_deep_text(100_000)), id="nested beyond what Python reads"),
        pytest.param(_write(_changed(plan={"chunk": _nested(400)})), id="nested deeply"),
        pytest.param(_write(_changed(experiment=[])), id="a list of fields"),
        pytest.param(_write(_changed(experiment={"mesh": 3, "ac": [], "model": None})), id="no groups"),
        pytest.param(_write(_changed(experiment={"mesh": {"dp_shard": "x"}})), id="a mesh of words"),
        pytest.param(_write(_changed(environment={"device": 7, "packages": "x"})), id="an odd environment"),
        pytest.param(_write(_changed(plan={"chunk": 3, "shard": {"x": []}})), id="a foreign plan"),
        pytest.param(_write(_changed(started_at="yesterday")), id="no time"),
        pytest.param(_write(_changed(note="\x1b]0;x\x07\x00\u202e\u2028</script>")), id="control characters"),
        pytest.param(_write("\x00" * 100), id="zeros"),
        pytest.param(_write('{"schema_version": 1e999}'), id="infinity"),
    ],
)
def test_a_report_shows_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], put: Callable[[Path], object]
) -> None:
    store = Store(tmp_path / "sweep")
    for each in (record(), record(experiment("none"))):
        store.write(each)
    store.trial_dir(ODD).mkdir()
    put(store.record_path(ODD))
    assert main([str(store.root), "--format", "html,markdown,csv"]) == 0
    said = capsys.readouterr()
    is_listed = f"acbench-report: {store.record_path(ODD)}: " in said.err and "; left out" in said.err
    assert is_listed or ODD in (store.root / "report.html").read_text("utf-8")
    assert "\x1b" not in said.out + said.err
    assert "full" in said.out


def test_a_record_that_only_a_report_cannot_show_is_named_with_the_reason(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write(record())
    (tmp_path / ODD).mkdir()
    (tmp_path / ODD / RECORD).write_text(_changed(experiment={"mesh": {"dp_shard": "x"}}))
    assert odd_records(tmp_path).keys() <= {ODD}
