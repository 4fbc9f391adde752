"""Tensors that the calls on a tape have met, and the slots that stand for them."""

from __future__ import annotations

import weakref
from typing import TypeAlias

from torch import Tensor

from strategies.nested.offloads import storage_of
from strategies.nested.tape import Slot

_Noted: TypeAlias = "tuple[weakref.ref[Tensor], Slot, bool, int]"
"""A tensor, its slot, and its `requires_grad` and version when a call on the tape had it last."""


class NotedTensors:
    """The tensors of one outermost region."""

    def __init__(self) -> None:
        self._noted: dict[int, _Noted] = {}
        self._outside: set[int] = set()  # storages
        self._rewritten: set[int] = set()

    def slot(self, tensor: Tensor) -> Slot | None:
        """Return the slot of `tensor`; `None` where it is new, or was changed by what is not on the tape."""
        found = self._noted.get(id(tensor))
        if found is None or found[0]() is not tensor or found[2] != tensor.requires_grad:
            return None
        if found[3] != version(tensor) and storage_of(tensor) not in self._rewritten:
            return None
        return found[1]

    def read(self, tensor: Tensor) -> Slot:
        """Return the slot of an argument, which comes from outside if nobody has met it."""
        slot = self.slot(tensor)
        if slot is None:
            slot = Slot(-1)
            self.note(tensor, slot)
            self._outside.add(storage_of(tensor))
        return slot

    def made(self, tensor: Tensor, position: int) -> Slot:
        """Return the slot of a result of call `position`; the result may be an argument."""
        slot = self.slot(tensor)
        if slot is None:
            slot = Slot(position)
            self.note(tensor, slot)
        return slot

    def change(self, tensor: Tensor) -> bool:
        """Take note that a call changed `tensor`; say whether that comes from outside."""
        storage = storage_of(tensor)
        self._rewritten.add(storage)
        for noted, slot, *_ in self._noted.values():
            other = noted()
            if other is not None and storage_of(other) == storage:
                slot.is_changed = True
        found = self._noted.get(id(tensor))
        if found is not None:
            self.note(tensor, found[1])
        return storage in self._outside

    def is_alone(self, tensor: Tensor, slot: Slot) -> bool:
        """Say whether no other tensor from outside has the memory of `tensor`."""
        others = (
            found[0]() for found in self._noted.values() if found[1].position < 0 and found[1] is not slot
        )
        storage = storage_of(tensor)
        return all(other is None or storage_of(other) != storage for other in others)

    def admit(self, tensor: Tensor) -> None:
        """Let calls change `tensor`, of which the region has a copy, until its memory is read once more."""
        self._outside.discard(storage_of(tensor))

    def note(self, tensor: Tensor, slot: Slot) -> None:
        """Have `slot` stand for `tensor` as it is now."""
        self._noted[id(tensor)] = weakref.ref(tensor), slot, tensor.requires_grad, version(tensor)

    def forget(self) -> None:
        """Know no tensor any more."""
        self._noted, self._outside, self._rewritten = {}, set(), set()


def version(tensor: Tensor) -> int:
    """Return the count of in-place writes of `tensor`; -1 where nobody counts."""
    return -1 if tensor.is_inference() else tensor._version  # noqa: SLF001 (as autograd checks it)
