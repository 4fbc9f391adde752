"""A step with any number of blocks, made of the steps with n blocks and with n + 1.

Both are lists in order of time. They must be equal but for stretches that the longer one has once more, each
the third of equal stretches side by side. Numbers of blocks count on in each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeAlias, TypeVar

_Item = TypeVar("_Item")
_MOST_SEAMS = 3
Numbered: TypeAlias = tuple[Hashable, int | None]
"""An item of a list without the number of its block, and that number; `None` where it has none."""


class UnlikeError(ValueError):
    """Two lists do not differ by one more of equal stretches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbering(Generic[_Item]):
    """A way to take the number of a block from an item, and to put it back."""

    split: Callable[[_Item], Numbered]
    join: Callable[[_Item, int], _Item]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seam:
    """A place where the longer list has a stretch once more.

    Fields:
        few, many: positions in the shorter and the longer list.
    """

    few: int
    many: int
    width: int


def stretched(
    shorter: Sequence[_Item], longer: Sequence[_Item], further: int, numbering: Numbering[_Item]
) -> list[_Item]:
    """Return the list with `further` blocks more than `longer`.

    Args:
        shorter: the list with n blocks.
        longer: the list with n + 1 blocks.
        further: number of blocks to add, >= 0.
        numbering: how items name their blocks.

    Raises:
        UnlikeError: they do not differ by one more of equal stretches, or do so in more than one way.
    """
    few, many = ([numbering.split(item) for item in items] for items in (shorter, longer))
    seams = _fewest_seams(_kinds(few), _kinds(many))

    def moved(position: int, move: int) -> _Item:
        item, number = longer[position], many[position][1]
        return item if number is None or not move else numbering.join(item, number + move)

    made: list[_Item] = []
    begin = _Seam(few=0, many=0, width=0)
    moves: list[int] = []  # of each item so far, by its place in the longer list
    for seam in [*seams, _Seam(few=len(few), many=len(many), width=0)]:
        moves += _moves(few[begin.few : seam.few], many[len(moves) : seam.many])
        made += [moved(at, moves[at] * further) for at in range(begin.many + begin.width, seam.many)]
        steps = _steps(many, seam)
        inside = range(seam.many, seam.many + seam.width)
        moves += [moves[at - seam.width] for at in inside]
        made += [
            moved(at, moves[at] * further + step * copy)
            for copy in range(further + 1 if seam.width else 0)
            for at, step in zip(inside, steps, strict=True)
        ]
        begin = seam
    return made


def _kinds(items: Sequence[Numbered]) -> list[Hashable]:
    return [(kind, number is None) for kind, number in items]


def _fewest_seams(few: Sequence[Hashable], many: Sequence[Hashable]) -> list[_Seam]:
    for count in range(_MOST_SEAMS + 1):
        found = list(islice(_seams(few, many, count), 2))
        if len(found) == 1:
            return found[0]
        if found:
            raise UnlikeError("it cannot be told which stretches a block more repeats")
    raise UnlikeError("a block more changes more than equal stretches")


def _seams(
    few: Sequence[Hashable], many: Sequence[Hashable], count: int, at: int = 0, shift: int = 0
) -> Iterator[list[_Seam]]:
    """Yield each way in which `count` stretches of the longer list explain what it has more.

    Args:
        at: position in `few` from which they are compared.
        shift: how much farther that is in `many`.
    """
    left = len(many) - len(few) - shift
    while at < len(few) and at + shift < len(many) and few[at] == many[at + shift]:
        at += 1
    if count == 0:
        yield from [[]] if left == 0 and at == len(few) else []
        return
    for width in range(left if count == 1 else 1, left + 1):
        if width > 0 and _is_repeated(many, at + shift, width):
            seam = _Seam(few=at, many=at + shift, width=width)
            for others in _seams(few, many, count - 1, at, shift + width):
                yield [seam, *others]


def _is_repeated(many: Sequence[Hashable], at: int, width: int) -> bool:
    """Return whether the `width` items at `at` have been there twice before, side by side."""
    if at < 2 * width or many[at] != many[at - width]:
        return False
    return many[at : at + width] == many[at - width : at] == many[at - 2 * width : at - width]


def _moves(few: Sequence[Numbered], many: Sequence[Numbered]) -> list[int]:
    """Return how each number grows with a block more: by 0 counted from the first, by 1 from the last."""
    moves = [(other or 0) - (one or 0) for (_, one), (_, other) in zip(few, many, strict=True)]
    if not set(moves) <= {0, 1}:
        raise UnlikeError("a block more gives other blocks other numbers")
    return moves


def _steps(many: Sequence[Numbered], seam: _Seam) -> list[int]:
    """Return by how much each number of a stretch differs from that of the stretch before: -1, 0 or 1."""
    last, middle, first = (
        [number or 0 for _, number in many[begin : begin + seam.width]]
        for begin in (seam.many - back * seam.width for back in (0, 1, 2))
    )
    steps = [one - other for one, other in zip(last, middle, strict=True)]
    before = [one - other for one, other in zip(middle, first, strict=True)]
    if steps != before or not set(steps) <= {-1, 0, 1}:
        raise UnlikeError("stretches do not count their blocks")
    return steps
