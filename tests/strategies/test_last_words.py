"""What is kept of an exception, whatever its own code does."""

from __future__ import annotations

import pytest

from strategies.last_words import last_words


class _MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


class _LeavingError(Exception):
    def __str__(self) -> str:
        raise SystemExit


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        pytest.param(ValueError("width"), "ValueError", "width", id="a text"),
        pytest.param(ValueError("x" * 5000), "ValueError", "x" * 4000, id="a text without end"),
        pytest.param(OSError("\udcff.bin"), "OSError", r"\udcff.bin", id="half characters"),
        pytest.param(
            _MuteError(), "_MuteError", "(its text cannot be had: RuntimeError)", id="a __str__ that raises"
        ),
        pytest.param(
            _LeavingError(), "_LeavingError", "(its text cannot be had: SystemExit)", id="one that leaves"
        ),
    ],
)
def test_an_exception_says_its_kind_and_message(error: BaseException, kind: str, message: str) -> None:
    words = last_words(error)
    assert (words.kind, words.message) == (kind, message)
    words.traceback.encode()
