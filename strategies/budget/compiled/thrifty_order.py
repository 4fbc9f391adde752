"""The order of backward that needs the fewest bytes at once: which operator runs next, of those that can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_HALVINGS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One operator of backward.

    Fields:
        after: numbers of the steps that it follows from.
        uses: storages that it reads, by number; each is freed with its last reader.
        makes: storages that it makes, with their bytes.
        making_bytes: most bytes of what is made again for it, and dropped before it runs.
        beside_bytes: bytes of what is made again for it, and there while it runs.
    """

    after: frozenset[int]
    uses: frozenset[int]
    makes: Mapping[int, int]
    making_bytes: int = 0
    beside_bytes: int = 0

    @property
    def most_bytes(self) -> int:
        """The most bytes on top of what lives before it."""
        return max(self.making_bytes, self.beside_bytes + sum(self.makes.values()))


def thrifty_order(steps: Sequence[Step], held: Mapping[int, int], outliving: frozenset[int]) -> Sequence[int]:
    """Return the numbers of the steps in an order of few bytes; in their own where none is found of fewer.

    For a limit, of those that can run within it the one that frees the most comes next. The limit is
    halved towards the smallest for which that ends.

    Args:
        steps: the steps, in an order in which they can run.
        held: storages that are there before, with their bytes.
        outliving: storages that nobody frees.
    """
    best = tuple(range(len(steps)))
    most = _Run(steps, held, outliving).most_bytes(best)
    low, high = max((step.most_bytes for step in steps), default=0), most
    for _ in range(_HALVINGS):
        limit = (low + high) // 2
        tried = (_Run(steps, held, outliving).within(limit, postpones=each) for each in (False, True))
        found = next((order for order in tried if order is not None), None)
        if found is None:
            low = limit
        else:
            best, high = found, _Run(steps, held, outliving).most_bytes(found)
    return best


class _Run:
    """Follows the bytes of one order."""

    def __init__(self, steps: Sequence[Step], held: Mapping[int, int], outliving: frozenset[int]) -> None:
        self._steps = steps
        self._bytes = dict(held)
        self._live = sum(held.values())
        self._readers: dict[int, int] = {}
        self._outliving = outliving
        for step in steps:
            for storage in step.uses:
                self._readers[storage] = self._readers.get(storage, 0) + 1

    def most_bytes(self, order: Sequence[int]) -> int:
        """Return the most bytes of an order."""
        most = 0
        for number in order:
            most = max(most, self._live + self._steps[number].most_bytes)
            self._take(number)
        return most

    def within(self, limit: int, *, postpones: bool) -> tuple[int, ...] | None:
        """Return an order that stays within a limit; `None` where none is found.

        Args:
            limit: most bytes.
            postpones: what makes bytes that nobody frees, such as gradients, waits until nothing else fits.
        """
        order: list[int] = []
        waiting = {number: set(step.after) for number, step in enumerate(self._steps)}
        ready = [number for number, after in waiting.items() if not after]
        users = _users(self._steps)
        while ready:
            fitting = [each for each in ready if self._live + self._steps[each].most_bytes <= limit]
            if not fitting:
                return None
            number = min(fitting, key=lambda each: (postpones and self._stays(each), self._added(each), each))
            self._take(number)
            order.append(number)
            ready.remove(number)
            for user in users.get(number, ()):
                waiting[user].discard(number)
                if not waiting[user]:
                    ready.append(user)
        return tuple(order)

    def _stays(self, number: int) -> bool:
        return self._added(number) > 0 and not self._outliving.isdisjoint(self._steps[number].makes)

    def _added(self, number: int) -> int:
        step = self._steps[number]
        last = (each for each in step.uses - self._outliving if self._readers[each] == 1)
        freed = sum(self._bytes.get(each, 0) for each in last)
        made = sum(
            size for each, size in step.makes.items() if each in self._readers or each in self._outliving
        )
        return made - freed

    def _take(self, number: int) -> None:
        step = self._steps[number]
        self._bytes.update(step.makes)
        self._live += self._added(number)
        for storage in step.uses:
            self._readers[storage] -= 1


def _users(steps: Sequence[Step]) -> Mapping[int, Sequence[int]]:
    users: dict[int, list[int]] = {}
    for number, step in enumerate(steps):
        for each in step.after:
            users.setdefault(each, []).append(number)
    return users
