"""What is said while many points are planned."""

from __future__ import annotations

import pytest

from harness.sweep import planning_log
from harness.sweep.planning_log import told


@pytest.mark.parametrize(
    ("count", "said"),
    [
        pytest.param(3, [], id="few"),
        pytest.param(
            4,
            ["checking 4 points", *(f"checking 4 points, {done} done" for done in (1, 2, 3))],
            id="many, each of which takes its time",
        ),
    ],
)
def test_of_many_points_it_is_said_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], count: int, said: list[str]
) -> None:
    monkeypatch.setattr(planning_log, "_MANY", 3)
    monkeypatch.setattr(planning_log, "PAUSE_S", 0.0)
    items = list(range(count))
    assert list(told(items, "checking", "points")) == items
    assert capsys.readouterr().err.splitlines() == [f"acbench: {line}" for line in said]
