"""Progress: one line that changes on a terminal, a line every two seconds at most elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from harness.fit.progress import progress_shown


class _Stream(io.StringIO):
    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize(
    ("is_terminal", "times", "expected"),
    [
        pytest.param(True, [0, 0, 1], "\r\x1b[K0 …\r\x1b[K1 …\r\x1b[K", id="a terminal"),
        pytest.param(False, [0, 0, 1.9], "", id="a log, all done at once"),
        pytest.param(False, [0, 2, 3, 4.5, 60], "0 …\n2 …\n3 …\n", id="a log, some soon after others"),
    ],
)
def test_progress(
    monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool, times: list[float], expected: str
) -> None:
    stream, clock = _Stream(is_terminal=is_terminal), iter(times)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with progress_shown() as tell:
        for number, _ in enumerate(times[1:]):
            tell(f"{number}")
    assert stream.getvalue() == expected
