from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from harness.ranks.node_report import Death, Halt, NodeReport, read_node_reports

_LATE = Halt(kind="time_limit", message="the time limit of the job was reached")


def _report(node_rank: int, attempt: str = "0", halt: Halt | None = None) -> NodeReport:
    return NodeReport(
        node_rank=node_rank,
        host="alpha",
        attempt=attempt,
        time=2.5,
        deaths=(Death(rank=1, code=-9, time=1.5), Death(rank=0, code=-15, time=2.0, ended=True)),
        halt=halt,
        waiting=(0,),
    )


@pytest.mark.parametrize("halt", [None, _LATE], ids=["by themselves", "by a halt"])
def test_a_report_is_read_as_it_was_written(tmp_path: Path, halt: Halt | None) -> None:
    report = _report(1, halt=halt)
    report.write(tmp_path)
    assert read_node_reports(tmp_path, "0") == {1: report}
    assert NodeReport.parse(json.dumps(asdict(report)).encode()) == report
    assert [path.name for path in tmp_path.iterdir()] == ["node1.json"]


def test_nodes_that_left_no_report_of_this_attempt_are_missing(tmp_path: Path) -> None:
    for node, attempt in ((10, "1"), (2, "1"), (3, "0")):
        _report(node, attempt).write(tmp_path)
    (tmp_path / ".node4.json").write_text("{", "utf-8")
    assert list(read_node_reports(tmp_path, "1")) == [2, 10]


def test_a_later_report_replaces_the_earlier(tmp_path: Path) -> None:
    _report(0, "0").write(tmp_path)
    _report(0, "1").write(tmp_path)
    assert read_node_reports(tmp_path, "0") == {}
    assert list(read_node_reports(tmp_path, "1")) == [0]


def test_an_unknown_halt_is_refused() -> None:
    message = "Halt.kind: must be one of deadline, time_limit, peer, terminated, got 'preempted'"
    with pytest.raises(ValueError, match=message):
        Halt(kind="preempted", message="")
