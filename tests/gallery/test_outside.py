"""Each case that outsiders brought has the right answer today."""

from __future__ import annotations

import pytest

from bench.gallery.outside import ask, case_names


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("case", case_names())
def test_the_answer_is_right(case: str) -> None:
    answer = ask(case)
    assert answer.after == answer.right, answer.asked
    assert answer.before != answer.right
