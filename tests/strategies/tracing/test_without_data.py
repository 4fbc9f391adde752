"""What a model raises without data is one sentence of ours, whatever the error is."""

from __future__ import annotations

import pytest

from strategies import StrategyError
from strategies.tracing.without_data import models_errors, words_of


class SilentError(Exception):
    """An error whose text cannot be asked for."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        pytest.param(ValueError("first\nsecond"), "ValueError: first", id="its first line"),
        pytest.param(KeyError("k"), "KeyError: 'k'", id="a key"),
        pytest.param(SilentError(), "SilentError: (its text cannot be read)", id="no text"),
    ],
)
def test_an_error_in_words(error: Exception, words: str) -> None:
    assert words_of(error) == words
    with pytest.raises(StrategyError) as found, models_errors("the model raises", "use data"):
        raise error
    assert str(found.value) == f"ac: the model raises {words}; use data"


def test_a_refusal_stays_as_it_is() -> None:
    refusal = StrategyError("ac", "no")
    with pytest.raises(StrategyError) as found, models_errors("the model raises", "use data"):
        raise refusal
    assert found.value is refusal
