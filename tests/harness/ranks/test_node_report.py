from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.ranks.node_report import Death, Halt, NodeReport

_LATE = Halt(kind="time_limit", message="the time limit of the job was reached")


def _report(node_rank: int, halt: Halt | None = None) -> NodeReport:
    return NodeReport(
        node_rank=node_rank,
        host="alpha",
        time=2.5,
        deaths=(Death(rank=1, code=-9, time=1.5), Death(rank=0, code=-15, time=2.0, ended=True)),
        halt=halt,
        waiting=(0,),
        places=("rank 0 is in forward (model.py, line 3)",),
    )


@pytest.mark.parametrize("halt", [None, _LATE], ids=["by themselves", "by a halt"])
def test_a_report_is_read_as_it_was_written(tmp_path: Path, halt: Halt | None) -> None:
    report = _report(1, halt=halt)
    report.write(tmp_path)
    assert NodeReport.of(json.loads((tmp_path / "node1.json").read_bytes())) == report
    assert [path.name for path in tmp_path.iterdir()] == ["node1.json"]


def test_a_later_report_replaces_the_earlier(tmp_path: Path) -> None:
    _report(0).write(tmp_path)
    _report(0, halt=_LATE).write(tmp_path)
    assert NodeReport.of(json.loads((tmp_path / "node0.json").read_bytes())) == _report(0, halt=_LATE)


def test_an_unknown_halt_is_refused() -> None:
    message = "Halt.kind: must be one of deadline, time_limit, peer, terminated, got 'preempted'"
    with pytest.raises(ValueError, match=message):
        Halt(kind="preempted", message="")
