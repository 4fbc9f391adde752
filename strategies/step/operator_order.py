"""The operators of a block's forward in order, and which of them a tape has to note.

A tape has to note what is kept, what runs again, and what is written to. The rest of a forward is neither
saved nor read by anything that runs again. A later call follows the order as long as its operators are the
same, and as long as all that autograd saves and all that is read again is noted or from outside of the block:
each such storage is looked up when it is used, so that no rewired forward passes for the one taken down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from strategies.estimate.liveness import key_of
from strategies.step.needed import needed
from strategies.step.operator_facts import OperatorFacts, facts_of

PASSED, NOTED, NOTED_SIMPLY, HELD = range(4)
"""Not at all; with all that operators can do; as one that does nothing but make tensors of others, or tensors
that all stay."""

DETACH, LIFT = torch.ops.aten.detach.default, torch.ops.aten.lift_fresh.default
"""Operators that plans do not count, and that are noted: what `detach` returns has a version of its own, and
`torch.tensor` has just made what `lift_fresh` returns, of numbers of Python."""


class Entry(NamedTuple):
    """One operator of a forward.

    Fields:
        call: runs it, as calling it would.
        number: how many run before it that plans count.
    """

    operator: Any
    call: Callable[..., Any]
    number: int
    how: int
    facts: OperatorFacts


class OperatorOrder(NamedTuple):
    """The operators of a forward.

    Fields:
        entries: all of them, views included.
        end: what follows the last one.
        outside: identities of the storages from outside of the block that are saved or read again.
        holders: keep these identities from being those of other storages.
    """

    entries: tuple[Entry, ...]
    end: Entry
    outside: frozenset[int]
    holders: tuple[StorageWeakRef, ...]


class OrderWriter:
    """Takes down the operators of a forward."""

    def __init__(self) -> None:
        self._found: list[tuple[Any, int, bool]] = []
        self._noted: set[int] = set()
        self._reads: dict[int, set[int]] = {}
        self._readers: dict[int, set[int]] = {}
        self._outside: dict[int, StorageWeakRef] = {}

    def takes(self, func: Any, number: int, *, is_counted: bool) -> None:
        """Take note of an operator, before which plans count so many."""
        self._found.append((func, number, is_counted))
        if is_counted and facts_of(func).writes:
            self._noted.add(number)

    def reads(self, number: int, home: object, maker: int | None) -> None:
        """Take note that an operator reads a storage, and which operator has made that."""
        self._readers.setdefault(id(home), set()).add(number)
        if maker is not None:
            self._reads.setdefault(number, set()).add(maker)

    def asks(self, maker: int) -> None:
        """Take note that something of what an operator makes is asked for in backward."""
        self._noted.add(maker)

    def uses(self, outside: Tensor) -> None:
        """Take note of a dense tensor from outside that is saved or read."""
        key = key_of(outside)
        if key not in self._outside:
            self._outside[key] = StorageWeakRef(outside.untyped_storage())

    def order(
        self, held: AbstractSet[tuple[int, int]], written: Iterable[object], count: int
    ) -> OperatorOrder:
        """Return the order.

        Args:
            held: what stays: numbers of operators, each with that of a result.
            written: storages that were written to, as `reads` had them: all who read them are noted.
            count: how many operators plans count.
        """
        readers = (number for home in written for number in self._readers.get(id(home), ()))
        first = {*self._noted, *(number for number, _ in held), *readers}
        noted = needed(first, lambda number: self._reads.get(number, ()))
        entries = (
            Entry(
                func,
                getattr(func, "_op", func),
                number,
                _how(func, number, held, is_noted=number in noted, is_counted=is_counted),
                facts_of(func),
            )
            for func, number, is_counted in self._found
        )
        end = Entry(None, DETACH, count, PASSED, facts_of(DETACH))
        return OperatorOrder(tuple(entries), end, frozenset(self._outside), tuple(self._outside.values()))


class KnownOrders:
    """The orders of a block's calls, by the number of dispatch modes around them. A copy has none.

    One call that leaves its order is the last that has one: operators, or what they read, change from call to
    call then, and all of them are followed.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._latest: _Known | None = None

    def begin(self, key: object) -> bool:
        """Begin a call; say whether it is to follow `order`, or to take its own down.

        Args:
            key: the same object for calls of equal sizes; `None` where nothing is known of that.
        """
        self._latest = None
        if key is None:
            return False
        depth = torch._C._len_torch_dispatch_stack()  # noqa: SLF001 (no public way)
        known = self._known.get(depth)
        if known is None or known.keys[0] is not key:
            known = self._known[depth] = _Known()
        if known.is_left:
            return False
        if known.order is None:
            known.keys = [key]
        self._latest = known
        return True

    @property
    def order(self) -> OperatorOrder | None:
        """The order of the call that has begun; `None` where it is not known."""
        return None if self._latest is None else self._latest.order

    def resume(self, number: int, key: object) -> bool:
        """Say whether a call that comes to its module of that number has been as its order so far."""
        known = self._latest
        if known is None:
            return True
        if known.order is None:
            known.keys.append(key)
        return known.keys[number] is key

    def end(self, order: OperatorOrder | None, *, is_in_order: bool) -> None:
        """End a call, with the order that it has taken down.

        Args:
            is_in_order: whether it has followed the one that was known.
        """
        known, self._latest = self._latest, None
        if known is None:
            return
        if known.order is None:
            known.order = order
        elif not is_in_order:
            known.order, known.is_left = None, True

    def __deepcopy__(self, memo: dict[int, Any]) -> KnownOrders:
        return KnownOrders()

    def __reduce__(self) -> tuple[Any, ...]:
        return KnownOrders, ()


@dataclass(slots=True, eq=False)
class _Known:
    """The order of some calls.

    Fields:
        keys: those of the call's modules.
        order: the order; `None` until a call has ended.
    """

    keys: list[object] = field(default_factory=lambda: [None])
    order: OperatorOrder | None = None
    is_left: bool = False


def _how(
    func: Any, number: int, held: AbstractSet[tuple[int, int]], *, is_noted: bool, is_counted: bool
) -> int:
    if not is_counted:
        return NOTED if func in {DETACH, LIFT} else PASSED
    if not is_noted:
        return PASSED
    facts = facts_of(func)
    is_simple = facts.is_fresh and not (
        facts.writes or facts.is_untagged or facts.is_collective or facts.makes_list
    )
    if not is_simple:
        return NOTED
    return HELD if all((number, result) in held for result in range(facts.makes)) else NOTED_SIMPLY
