"""Answers are kept under what they follow from: all of it, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest

from strategies.budget.kept import Answers, kept_by
from tests.strategies.budget.small_steps import Remembering


class Pair(NamedTuple):
    first: int
    second: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    number: float = 0.1
    pair: Pair = field(default_factory=lambda: Pair(1, "two"))
    names: frozenset[str] = frozenset({"a", "b"})
    places: dict[int, int] = field(default_factory=lambda: {1: 2})
    told: bool | None = None
    held: Any = field(default_factory=lambda: np.arange(3))


def test_equal_questions_have_one_answer() -> None:
    keeper = Remembering()
    with kept_by(keeper):
        assert Answers(Question(), [1]).read("count") is None
        Answers(Question(), [1]).write("count", 3)
        assert Answers(Question(names=frozenset("ba")), [1]).read("count") == 3
        assert Answers(Question(), [1]).read("sum") is None


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(Question(number=0.1 + 2**-56), id="a number"),
        pytest.param(Question(pair=Pair(1, "2")), id="a text"),
        pytest.param(Question(names=frozenset({"a"})), id="a set"),
        pytest.param(Question(names=frozenset({"a', 'b"})), id="text that looks like two"),
        pytest.param(Question(places={2: 1}), id="a mapping"),
        pytest.param(Question(told=False), id="nothing and false"),
        pytest.param(Question(told=bool(1)), id="nothing and true"),
        pytest.param(Question(held=np.arange(3) + 1), id="an array"),
        pytest.param(Question(held=np.arange(3, dtype=np.int32)), id="the type of an array"),
        pytest.param(Question(held=np.arange(3)[:, None]), id="the shape of an array"),
        pytest.param(Question(held=[0, 1, 2]), id="a list in its place"),
    ],
)
def test_another_question_has_another_answer(other: Question) -> None:
    with kept_by(Remembering()):
        Answers(Question()).write("count", 3)
        assert Answers(other).read("count") is None


def test_what_has_no_canonical_text_is_refused() -> None:
    with kept_by(Remembering()), pytest.raises(TypeError, match=r"^no canonical text of a object$"):
        Answers(object())


def test_where_nobody_keeps_anything_nothing_is_known() -> None:
    with kept_by(Remembering()):
        Answers(Question()).write("count", 3)
    answers = Answers(object())
    answers.write("count", 3)
    assert answers.read("count") is None


def test_what_is_found_together_is_kept_under_one_name() -> None:
    keeper = Remembering()
    with kept_by(keeper):
        with Answers("all").together("found"):
            for number, name in enumerate(["none", "one", "two"]):
                Answers(number).write("name", name)
        assert len(keeper.texts) == 1
        assert Answers(2).read("name") is None
        keeper.texts = {name: text.replace("two", "zwei") for name, text in keeper.texts.items()}
        with Answers("all").together("found"):
            assert Answers(2).read("name") == "zwei"


def _failing() -> None:
    with Answers("all").together("found"):
        Answers(2).write("name", "two")
        raise KeyError


def test_where_nothing_more_is_found_nothing_is_written() -> None:
    keeper = Remembering()
    with kept_by(keeper):
        with Answers("all").together("found"):
            assert Answers(2).read("name") is None
        with pytest.raises(KeyError):
            _failing()
    assert not keeper.texts


def test_nobody_keeps_what_is_found_together() -> None:
    with Answers("all").together("found"):
        Answers(2).write("name", "two")
    with Answers("all").together("found"):
        assert Answers(2).read("name") is None
