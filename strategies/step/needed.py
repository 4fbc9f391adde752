"""Operators that must run again for some values: the one walk from readers back to what they follow from."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

Item = TypeVar("Item", bound=Hashable)


def needed(first: Iterable[Item], before: Callable[[Item], Iterable[Item]]) -> set[Item]:
    """Return `first`, and all that they need, in no order.

    Args:
        before: returns what one needs directly, without what is there already.
    """
    found: set[Item] = set()
    todo = list(first)
    while todo:
        item = todo.pop()
        if item not in found:
            found.add(item)
            todo += before(item)
    return found
