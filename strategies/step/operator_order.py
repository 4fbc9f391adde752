"""The operators of a block's forward in order, and which of them a tape has to note.

A tape has to note what is kept, what runs again, and what is written to. The rest of a forward is neither
saved nor read by anything that runs again. A later call follows the order as long as its operators are the
same, and as long as all that autograd saves and all that is read again is noted or from outside of the block:
each such storage is looked up when it is used, so that no rewired forward passes for the one taken down.

A mode that sees an operator costs more than a small operator. So a tape *sleeps* where several operators in a
row are not noted: it leaves the stack of modes when autograd saves the tensor of its number, and comes back
with that of another. Meanwhile it sees what autograd saves, and how many nodes it makes. What is kept and
read by nothing that runs again needs no more than that.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._dynamo import eval_frame
from torch.multiprocessing.reductions import StorageWeakRef

from strategies.estimate.liveness import key_of
from strategies.regions.versions import PLAIN
from strategies.step.late_value import MayBeLate
from strategies.step.needed import needed
from strategies.step.operator_facts import OperatorFacts, facts_of

PASSED, NOTED, NOTED_SIMPLY, HELD = range(4)
"""Not at all; with all that operators can do; as one that does nothing but make tensors of others, or tensors
that all stay."""

DETACH, LIFT = torch.ops.aten.detach.default, torch.ops.aten.lift_fresh.default
"""Operators that plans do not count, and that are noted: what `detach` returns has a version of its own, and
`torch.tensor` has just made what `lift_fresh` returns, of numbers of Python."""

STAY, SLEEP, WAKE = range(3)
"""What a tape does with a tensor that autograd saves, beside packing it."""

Address: TypeAlias = tuple[int, int]
"""Operator that makes a storage, and number of the result."""

_LEAST_SLEEP = 2
"""Operators that are worth leaving the stack for: a dispatch takes 12 to 16 us, both ways together 3."""

nodes_made: Callable[[], int] = torch._C._autograd._get_sequence_nr  # noqa: SLF001 (no public way)


class Entry(NamedTuple):
    """One operator of a forward.

    Fields:
        call: runs it, as calling it would.
        number: how many run before it that plans count.
        facts: what is known of the operator.
        versions: sum of the versions of what it reads that the block has made.
    """

    operator: Any
    call: Callable[..., Any]
    number: int
    how: int
    facts: OperatorFacts
    versions: int = 0


class Saving(NamedTuple):
    """One tensor that autograd saves in a forward.

    Fields:
        rest: the operators that follow.
        number: how many run before it that plans count.
        kept: address of a value that stays and whose operator is not noted; `None` of others.
        is_read: whether something that runs again reads that value.
        is_late: whether backward reads the tensor later than it asks for it.
        is_result: whether it may be what its node makes.
        version: that of the tensor.
        turn: whether the tape sleeps from here on, or wakes.
        nodes: how many nodes autograd has made while it slept.
    """

    rest: tuple[Entry, ...]
    number: int
    kept: Address | None
    is_read: bool
    is_late: bool
    is_result: bool
    version: int
    turn: int
    nodes: int


class OperatorOrder(NamedTuple):
    """The operators of a forward.

    Fields:
        entries: all of them, views included.
        end: what follows the last one.
        outside: identities of the storages from outside of the block that are saved or read again.
        holders: keep these identities from being those of other storages.
        savings: what autograd saves.
        nodes: how many nodes it has made since a sleep that lasts until forward ends.
    """

    entries: tuple[Entry, ...]
    end: Entry
    outside: frozenset[int]
    holders: tuple[StorageWeakRef, ...]
    savings: tuple[Saving, ...]
    nodes: int


class _Found(NamedTuple):
    """An operator as it was taken down."""

    operator: Any
    number: int
    is_counted: bool


class _Saved(NamedTuple):
    """A tensor that autograd has saved: how many operators came before it, and nodes were made.

    Fields:
        is_top: whether the tape was the innermost mode.
        is_between: whether it was saved after an operator. Before one the modes that see it are settled.
    """

    position: int
    address: Address | None
    version: int
    is_top: bool
    is_between: bool
    nodes: int


class OrderWriter:
    """Takes down the operators of a forward.

    Attributes:
        nodes: how many nodes autograd has made when forward ends.
        may_sleep: whether operators may come unseen: forward takes no gradient and runs no compiled code.
    """

    def __init__(self) -> None:
        self.nodes = self._nodes = 0
        self.may_sleep = True
        self._found: list[_Found] = []
        self._saved: list[_Saved] = []
        self._noted: set[int] = set()
        self._reads: dict[int, set[Address]] = {}
        self._versions: dict[int, int] = {}
        self._readers: dict[int, set[int]] = {}
        self._writers: dict[int, set[int]] = {}
        self._outside: dict[int, StorageWeakRef] = {}
        self._wrapped: set[Address] = set()
        self._tickets: dict[int, weakref.ref[MayBeLate]] = {}

    def takes(self, func: Any, number: int, *, is_counted: bool) -> None:
        """Take note of an operator, before which plans count so many."""
        self._found.append(_Found(func, number, is_counted))
        self._nodes = nodes_made()
        self.may_sleep &= torch._C._current_graph_task_id() < 0  # noqa: SLF001 (no public way)

    def saves(self, address: Address | None, saved: Tensor, *, is_top: bool) -> None:
        """Take note of a tensor that autograd saves, and what has made it.

        Args:
            is_top: whether the tape is the innermost mode.
        """
        version = saved._version  # noqa: SLF001 (as autograd counts it)
        is_between, nodes = self._nodes == nodes_made(), nodes_made()
        self._saved.append(_Saved(len(self._found), address, version, is_top, is_between, nodes))
        self.may_sleep &= not _is_compiled()
        if address is not None:
            self._noted.add(address[0])
            if type(saved) not in PLAIN:
                self._wrapped.add(address)

    def packs(self, ticket: MayBeLate) -> None:
        """Take note of what the graph holds for the latest of these tensors."""
        self._tickets[len(self._saved) - 1] = weakref.ref(ticket)

    def reads(self, number: int, home: object, address: Address | None, version: int) -> None:
        """Take note that an operator reads a storage, and what has made that."""
        self._readers.setdefault(id(home), set()).add(number)
        if address is not None:
            self._reads.setdefault(number, set()).add(address)
            self._versions[number] = self._versions.get(number, 0) + version

    def writes(self, number: int, home: object) -> None:
        """Take note that an operator writes to a storage."""
        self._writers.setdefault(id(home), set()).add(number)

    def asks(self, maker: int) -> None:
        """Take note that something of what an operator makes is asked for in backward."""
        self._noted.add(maker)

    def uses(self, outside: Tensor) -> None:
        """Take note of a dense tensor from outside that is saved or read."""
        key = key_of(outside)
        if key not in self._outside:
            self._outside[key] = StorageWeakRef(outside.untyped_storage())

    def order(
        self,
        held: AbstractSet[Address],
        written: Sequence[tuple[object, Address | None]],
        count: int,
        *,
        kept: AbstractSet[Address],
    ) -> OperatorOrder:
        """Return the order.

        Args:
            held: what stays.
            written: storages that were written to, as `reads` had them, and their addresses.
            count: how many operators plans count.
            kept: what stays on the device; where it is saved before it is read, it needs no note.
        """
        noted = self._all_noted(held, written)
        read = self._first_reads(noted)
        changed = {address for _, address in written}
        kept = {
            address
            for address, position in self._first_saved().items()
            if address in kept - changed - self._wrapped and position <= read.get(address, position)
        }
        entries = tuple(
            Entry(
                each.operator,
                getattr(each.operator, "_op", each.operator),
                each.number,
                _how(each, held, kept, is_noted=each.number in noted),
                facts_of(each.operator),
                self._versions.get(each.number, 0),
            )
            for each in self._found
        )
        end = Entry(None, DETACH, count, PASSED, facts_of(DETACH))
        awake = [position for position, entry in enumerate(entries) if entry.how != PASSED]
        turns = self._turns([*awake, len(entries)]) if self.may_sleep else {}
        asleep = self.nodes
        savings = []
        for number, saved in enumerate(self._saved):
            rest, turn = entries[saved.position :], turns.get(number, STAY)
            address = saved.address if saved.address in kept else None
            ticket = self._tickets[number]() if number in self._tickets else None
            savings.append(
                Saving(
                    rest=rest,
                    number=rest[0].number if rest else count,
                    kept=address,
                    is_read=address in read,
                    is_late=ticket is not None and ticket.is_late,
                    is_result=saved.is_between,
                    version=saved.version,
                    turn=turn,
                    nodes=saved.nodes - asleep,
                )
            )
            asleep = saved.nodes if turn == SLEEP else asleep
        holders, outside = tuple(self._outside.values()), frozenset(self._outside)
        return OperatorOrder(entries, end, outside, holders, tuple(savings), self.nodes - asleep)

    def _first_saved(self) -> dict[Address, int]:
        """Return how many operators come before the first time that each value of the block is saved."""
        return {each.address: each.position for each in reversed(self._saved) if each.address is not None}

    def _first_reads(self, noted: AbstractSet[int]) -> dict[Address, int]:
        """Return how many operators come before the first noted one that reads each value of the block."""
        found: dict[Address, int] = {}
        for position, each in enumerate(self._found):
            if each.is_counted and each.number in noted:
                for address in self._reads.get(each.number, ()):
                    found.setdefault(address, position)
        return found

    def _all_noted(
        self, held: AbstractSet[Address], written: Sequence[tuple[object, Address | None]]
    ) -> set[int]:
        """Return the operators that are noted.

        What is written to matters where it is from outside, stays, or is made again; all who read it, or
        write to it, are noted then.
        """
        first = {*self._noted, *(number for number, _ in held)}
        if not self.may_sleep:  # a chain forgets what was written to before its next block
            found = (each for each in self._found if each.is_counted)
            first |= {each.number for each in found if facts_of(each.operator).writes}
        while True:
            noted = needed(first, lambda number: [maker for maker, _ in self._reads.get(number, ())])
            more = {
                number
                for home, address in written
                if address is None or address in held or address[0] in noted
                for number in (*self._readers.get(id(home), ()), *self._writers.get(id(home), ()))
            }
            if more <= first:
                return noted
            first |= more

    def _turns(self, awake: Sequence[int]) -> dict[int, int]:
        """Return which of the saved tensors begin or end a sleep.

        Args:
            awake: positions of the operators that the tape has to see, and the end.
        """
        turns: dict[int, int] = {}
        number, end = 0, awake[-1]
        while number < len(self._saved):
            saved = self._saved[number]
            until = next(each for each in awake if each >= saved.position)
            wake = None if until == end else self._wake(number, until)
            ends = until if wake is None else self._saved[wake].position
            if saved.is_top and ends - saved.position >= _LEAST_SLEEP:
                turns[number] = SLEEP
                if wake is None:
                    break
                turns[wake] = WAKE
                number = wake
            number += 1
        return turns

    def _wake(self, sleep: int, until: int) -> int:
        """Return the last tensor with which one can wake before an operator; `sleep` itself without one."""
        found = sleep
        for number in range(sleep + 1, len(self._saved)):
            saved = self._saved[number]
            if saved.position > until:
                break
            if saved.is_top and saved.is_between:
                found = number
        return found


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


def _is_compiled() -> bool:
    """Say whether compiled code calls this, which is compiled anew where no mode sees it."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 (no public way to a caller's caller)
    while frame is not None and frame.f_code.co_filename != eval_frame.__file__:
        frame = frame.f_back
    return frame is not None


def _how(found: _Found, held: AbstractSet[Address], kept: AbstractSet[Address], *, is_noted: bool) -> int:
    func, number = found.operator, found.number
    if not found.is_counted:
        return NOTED if func in {DETACH, LIFT} else PASSED
    if not is_noted:
        return PASSED
    facts = facts_of(func)
    is_simple = facts.is_fresh and not (
        facts.writes or facts.is_untagged or facts.is_collective or facts.makes_list
    )
    if not is_simple:
        return NOTED
    made = [(number, result) for result in range(facts.makes)]
    if all(each in kept for each in made):
        return PASSED
    return HELD if all(each in held for each in made) else NOTED_SIMPLY
