from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.ranks.entry import RankContext
from harness.ranks.rank_report import RankReport, read_kept, read_reports
from harness.ranks.start import RankJob, RankStart


def _context(folder: Path, rank: int = 0) -> RankContext:
    return RankContext(
        RankStart(
            job=RankJob(
                trial_dir=folder, entry="tests.harness.rank_entries:ok", payload=b"", ranks=2, deadline_s=1.0
            ),
            local_rank=rank,
        )
    )


def _summary(folder: Path, rank: int = 0) -> dict[str, Any]:
    report = json.loads((folder / f"rank{rank}.json").read_text("utf-8"))
    return {key: report[key] for key in ("state", "phase", "done", "total", "kind", "message", "result")}


def _expected(state: str, **fields: Any) -> dict[str, Any]:
    nothing = {"phase": "build", "done": 0, "total": 0, "kind": None, "message": None, "result": None}
    return {"state": state, **nothing, **fields}


def test_a_rank_reports_from_start_to_result(tmp_path: Path) -> None:
    with _context(tmp_path) as context:
        assert _summary(tmp_path) == _expected("started")
        context.phase("timing")
        assert _summary(tmp_path) == _expected("running", phase="timing")
        context.progress(10, 10)
        assert _summary(tmp_path) == _expected("running", phase="timing", done=10, total=10)
        context.finish({"saved_bytes": 4})
    assert context.is_ok
    assert _summary(tmp_path) == _expected("ok", phase="timing", result={"saved_bytes": 4})
    assert [path.name for path in tmp_path.iterdir()] == ["rank0.json"]


def test_what_is_measured_is_kept_until_there_is_a_result(tmp_path: Path) -> None:
    with _context(tmp_path) as context:
        context.keep({"rank": 0, "memory": 1})
        assert read_kept(tmp_path, 1) == [{"rank": 0, "memory": 1}]
        assert read_kept(tmp_path, 2) == []
        context.keep({"rank": 0, "memory": 1, "parity": 2})
        assert read_kept(tmp_path, 1) == [{"rank": 0, "memory": 1, "parity": 2}]
        context.finish({"rank": 0})
    assert read_kept(tmp_path, 1) == []
    assert [path.name for path in tmp_path.iterdir()] == ["rank0.json"]


def test_progress_writes_now_and_then_and_the_last_step_always(tmp_path: Path) -> None:
    context = _context(tmp_path)
    context.phase("timing")
    context.progress(1, 3)
    assert _summary(tmp_path)["done"] == 0
    context.progress(3, 3)
    assert _summary(tmp_path)["done"] == 3


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        pytest.param(ValueError("width"), "ValueError", "width", id="an exception"),
        pytest.param(SystemExit("no more"), "SystemExit", "no more", id="an exit"),
        pytest.param(RuntimeError("x" * 5000), "RuntimeError", "x" * 4000, id="a message without end"),
    ],
)
def test_what_ends_the_entry_becomes_a_report(
    tmp_path: Path, error: BaseException, kind: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with _context(tmp_path) as context:
        context.phase("instrument")
        raise error
    assert not context.is_ok
    assert _summary(tmp_path) == _expected("error", phase="instrument", kind=kind, message=message)
    trace = read_reports(tmp_path)[0].traceback
    assert trace is not None
    assert trace.endswith(message + "\n")
    assert capsys.readouterr().err.endswith(trace)


def test_a_result_that_is_no_json_is_an_error_and_keeps_no_torn_file(tmp_path: Path) -> None:
    with _context(tmp_path) as context:
        context.finish({"bytes": b""})
    assert _summary(tmp_path) == _expected(
        "error", kind="TypeError", message="Object of type bytes is not JSON serializable"
    )


def test_an_unknown_phase_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="phase: must be one of build, instrument, parity, timing, got 'warm-up'"
    ):
        _context(tmp_path).phase("warm-up")


def test_reports_are_read_by_rank_and_what_is_missing_is_missing(tmp_path: Path) -> None:
    for rank in (10, 2):
        RankReport(rank=rank, state="running", phase="build", time=1.5).write(tmp_path)
    (tmp_path / ".rank3.json").write_text("{", "utf-8")
    assert list(read_reports(tmp_path)) == [2, 10]
    assert read_reports(tmp_path)[10].time == 1.5
