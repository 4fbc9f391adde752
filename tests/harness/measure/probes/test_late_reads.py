"""A bisection finds the groups with an effect, in the steps that it has."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from harness.measure.probes.late_reads import (
    Bisection,
    Effect,
    Group,
    LateRead,
    LateReads,
    groups_of,
    singles_of,
)
from harness.measure.probes.spots import Spot

LETTERS = [Group(kind="number", spots=(letter,)) for letter in "abcdefgh"]


def _found(read: str, raising: str, steps: int) -> tuple[str, str, str, int]:
    """Return names of what is found, loud and open, and the steps that were taken."""

    def effect(groups: Sequence[Group]) -> Effect:
        changed = {group.spots[0] for group in groups}
        return "error" if changed & set(raising) else "gradients" if changed & set(read) else "none"

    bisection = Bisection(effect=effect, steps_left=steps)
    bisection.search(LETTERS)
    names = [
        "".join(each.spots[0] for each in kind) for kind in (bisection.found, bisection.loud, bisection.open)
    ]
    return names[0], names[1], names[2], steps - bisection.steps_left


@pytest.mark.parametrize(
    ("read", "raising", "steps", "expected"),
    [
        pytest.param("", "", 9, ("", "", "", 1), id="nothing is read"),
        pytest.param("a", "", 9, ("a", "", "", 7), id="the first"),
        pytest.param("h", "", 9, ("h", "", "", 4), id="the last: what it must be takes no step"),
        pytest.param("bg", "", 20, ("bg", "", "", 9), id="two"),
        pytest.param("ah", "c", 20, ("ah", "c", "", 11), id="an error hides nothing"),
        pytest.param("abcdefgh", "", 4, ("a", "", "bcdefgh", 4), id="too few steps"),
    ],
)
def test_finds(read: str, raising: str, steps: int, expected: tuple[str, str, str, int]) -> None:
    assert _found(read, raising, steps) == expected


def _spot(kind: str, name: str, attribute: str) -> Spot:
    return Spot(kind, name, attribute, lambda: lambda: None)


SPOTS = [
    _spot("number", "head.p", "p"),
    _spot("mode", "training", "training"),
    _spot("number", "blocks.0.p", "p"),
    _spot("buffer", "blocks.0.table[3]", "table[3]"),
]


def test_groups_are_attributes_likeliest_kind_first_and_named_by_what_is_recomputed() -> None:
    assert [str(group.late_read) for group in groups_of(SPOTS, ["blocks.0"])] == [
        "training",
        "blocks.0.table[3]",
        "blocks.0.p and 1 alike",
    ]


def test_a_name_stands_for_what_it_holds() -> None:
    (group,) = singles_of(SPOTS, ["blocks.0.table", "blocks.1.table"])
    assert (group.spots, str(group.late_read)) == (("blocks.0.table[3]",), "blocks.0.table")


def test_notes_name_what_was_not_looked_for() -> None:
    reads = LateReads(open=tuple(LateRead("number", name) for name in "abcde"))
    assert reads.notes == ("whether the recomputation reads a, b, c and 2 more was not looked for",)
