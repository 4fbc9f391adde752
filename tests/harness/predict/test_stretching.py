"""A list that repeats a stretch once more with each block is known for any number of blocks."""

from __future__ import annotations

import re

import pytest

from harness.predict.stretching import Numbered, Numbering, UnlikeError, stretched


def _split(item: str) -> Numbered:
    found = re.fullmatch(r"([a-z]+)(\d*)", item)
    assert found is not None
    return found[1], int(found[2]) if found[2] else None


_WORDS = Numbering(split=_split, join=lambda item, number: item.rstrip("0123456789") + str(number))


@pytest.mark.parametrize(
    ("shorter", "longer", "expected"),
    [
        pytest.param("x y", "x y", "x y", id="no block in it"),
        pytest.param("a a", "a a a", "a a a a a", id="equal items"),
        pytest.param(
            "in b0 b1 b2 out", "in b0 b1 b2 b3 out", "in b0 b1 b2 b3 b4 b5 out", id="counting upwards"
        ),
        pytest.param(
            "in b2 b1 b0 out", "in b3 b2 b1 b0 out", "in b5 b4 b3 b2 b1 b0 out", id="counting downwards"
        ),
        pytest.param(
            "g0 b0 f0 g1 b1 f1 g2 b2 f2",
            "g0 b0 f0 g1 b1 f1 g2 b2 f2 g3 b3 f3",
            "g0 b0 f0 g1 b1 f1 g2 b2 f2 g3 b3 f3 g4 b4 f4 g5 b5 f5",
            id="several items a block",
        ),
        pytest.param(
            "b0 p1 b1 p2 b2 last2", "b0 p1 b1 p2 b2 p3 b3 last3", "b0 p1 b1 p2 b2 p3 b3 p4 b4 p5 b5 last5",
            id="the next block is named, and the last",
        ),
        pytest.param(
            "z z z x b0 b1 b2", "z z z z x b0 b1 b2 b3", "z z z z z z x b0 b1 b2 b3 b4 b5", id="two stretches"
        ),
    ],
)  # fmt: skip
def test_two_more_blocks(shorter: str, longer: str, expected: str) -> None:
    assert " ".join(stretched(shorter.split(), longer.split(), 2, _WORDS)) == expected


@pytest.mark.parametrize(
    ("shorter", "longer"),
    [
        pytest.param("x y", "x z", id="another item"),
        pytest.param("b0 b1 b2 b3", "b0 b1 b2", id="fewer items"),
        pytest.param("b0 b1", "b0 c1 b2", id="every second block"),
        pytest.param("x b0", "x b0 b1", id="two equal stretches alone"),
        pytest.param("b0 b1 b2", "b0 b1 b5 b3", id="other numbers"),
        pytest.param("b0 b1 b2", "b0 b1 b2 b4", id="numbers that do not count"),
        pytest.param("b0 b1 b2 x", "b0 b1 b2 x b3", id="a block in another place"),
    ],
)
def test_lists_that_differ_otherwise_are_refused(shorter: str, longer: str) -> None:
    with pytest.raises(UnlikeError):
        stretched(shorter.split(), longer.split(), 2, _WORDS)
