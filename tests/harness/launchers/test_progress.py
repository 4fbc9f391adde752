from __future__ import annotations

import io
import re

import pytest

from harness.launchers.progress import SweepProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drive(stream: io.StringIO) -> str:
    """Run a sweep of two points of which the first was done before, and return what was written."""
    with SweepProgress(stream) as progress:
        progress.start(2)
        progress.point_finished("none [single]", "ok, done before", "neutral")
        progress.point_started("full [shard2]")
        progress.steps(1, 3)
        progress.steps(3, 3)
        progress.point_finished("full [shard2]", "oom", "unverified")
    return re.sub(r"\d+\.\d s", "0.0 s", stream.getvalue())


def test_plain_lines_elsewhere_than_on_a_terminal() -> None:
    assert drive(io.StringIO()).splitlines() == [
        "[1/2] none [single]: ok, done before, neutral",
        "[2/2] full [shard2] ...",
        "[2/2] full [shard2]: oom, unverified (0.0 s)",
    ]


def test_on_a_terminal_finished_points_stay_above_the_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drive(Terminal()))
    assert "[1/2] none [single]: ok, done before, neutral" in text
    assert "[2/2] full [shard2]: oom, unverified (0.0 s)" in text
    assert "points" in text


def test_a_point_that_another_command_runs_is_announced() -> None:
    stream = io.StringIO()
    with SweepProgress(stream) as progress:
        progress.start(1)
        progress.point_waits("full on single")
        progress.point_finished("full on single", "ok, done before", "neutral")
    assert stream.getvalue().splitlines() == [
        "[1/1] full on single: another command runs it, waiting ...",
        "[1/1] full on single: ok, done before, neutral",
    ]


def test_nothing_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with SweepProgress() as progress:
        progress.start(1)
        progress.point_started("full")
        progress.point_finished("full", "ok", "neutral")
    assert capsys.readouterr().out == ""


def test_names_between_colons_stay_letters() -> None:
    stream = io.StringIO()
    with SweepProgress(stream) as progress:
        progress.start(1)
        progress.point_finished("full on single, user:memo", "ok", "neutral")
    assert "user:memo: ok" in stream.getvalue()
