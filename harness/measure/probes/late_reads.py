"""Values beyond its inputs that a recomputation reads, found by changing them after forward.

The plain model has read all of it when forward is over. A variant whose gradients become others has read it
once more, late. That is no wrong gradient as long as nothing changes in between; where something does, the
gradients are wrong, and no error says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal, TypeAlias

from harness.measure.probes.spots import KINDS, Spot

_SHOWN = 3
"""Names that a sentence has."""

Effect: TypeAlias = Literal["none", "gradients", "error"]
"""What a change between forward and backward does."""


@dataclass(frozen=True, slots=True)
class LateRead:
    """State of one name that a recomputation reads.

    Fields:
        kind: one of `KINDS`.
        name: path of the first piece of state of that name.
        count: how many there are: blocks repeat.
    """

    kind: str
    name: str
    count: int = 1

    def __str__(self) -> str:
        return self.name if self.count == 1 else f"{self.name} and {self.count - 1} alike"


@dataclass(frozen=True, kw_only=True, slots=True)
class LateReads:
    """The findings of a search.

    Fields:
        reads: what a recomputation reads; none where nothing is read, or where it was not looked for.
        open: what it may read: the search has ended before it was asked for.
    """

    reads: tuple[LateRead, ...] = ()
    open: tuple[LateRead, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The values that are read, in words."""
        return tuple(map(str, self.reads))

    @property
    def notes(self) -> tuple[str, ...]:
        """The kinds of values that were not searched."""
        if not self.open:
            return ()
        names = ", ".join(map(str, self.open[:_SHOWN]))
        more = f" and {len(self.open) - _SHOWN} more" if len(self.open) > _SHOWN else ""
        return (f"whether the recomputation reads {names}{more} was not looked for",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Pieces of state that are changed together.

    Fields:
        kind: one of `KINDS`.
        spots: their names; the first stands for all.
        name: what all of them are in; empty for the first.
    """

    kind: str
    spots: tuple[str, ...]
    name: str = ""

    @property
    def late_read(self) -> LateRead:
        """The name of the value where a recomputation reads it."""
        return (
            LateRead(self.kind, self.name)
            if self.name
            else LateRead(self.kind, self.spots[0], len(self.spots))
        )


def singles_of(spots: Iterable[Spot], names: Collection[str]) -> list[Group]:
    """Return one group for each of `names` that spots have, or that hold some."""
    held = list(spots)
    found = []
    for name in names:
        inside = [
            spot for spot in held if spot.name == name or spot.name.startswith((f"{name}.", f"{name}["))
        ]
        if inside:
            names_inside = tuple(spot.name for spot in inside)
            found.append(Group(kind=inside[0].kind, spots=names_inside, name=name))
    return found


def groups_of(spots: Iterable[Spot], first: Collection[str]) -> list[Group]:
    """Return `spots` by kind and attribute, likeliest kind first.

    Args:
        spots: state of the plain model.
        first: FQNs of modules that are recomputed; their state gives a group its name.
    """

    def place(spot: Spot) -> tuple[int, str]:
        return KINDS.index(spot.kind), spot.attribute

    def is_outside(spot: Spot) -> bool:
        return not any(spot.name.startswith(f"{fqn}.") for fqn in first)

    grouped = groupby(sorted(spots, key=place), key=place)
    return [
        Group(kind=KINDS[kind], spots=tuple(spot.name for spot in sorted(members, key=is_outside)))
        for (kind, _), members in grouped
    ]


@dataclass(kw_only=True, slots=True)
class Bisection:
    """Finds the groups whose change has an effect, in as many steps as it is given.

    Fields:
        effect: takes a step in which groups are changed, and says what that does.
        steps_left: steps that may still be taken.
        found: groups whose change alone makes other gradients.
        loud: groups whose change alone raises.
        open: groups of which nothing is known, because no step was left.
    """

    effect: Callable[[Sequence[Group]], Effect]
    steps_left: int
    found: list[Group] = field(default_factory=list)
    loud: list[Group] = field(default_factory=list)
    open: list[Group] = field(default_factory=list)

    def search(self, groups: Sequence[Group], *, known: Effect | None = None) -> Effect | None:
        """Look among `groups`, and return what a change of all of them does; `None` where no step is left."""
        if not groups:
            return "none"
        effect = known or self._step(groups)
        if effect is None or effect == "none":
            return effect
        if len(groups) == 1:
            (self.found if effect == "gradients" else self.loud).append(groups[0])
            return effect
        middle = len(groups) // 2
        # a half that does nothing leaves the effect of both to the other
        earlier = self.search(groups[:middle])
        self.search(groups[middle:], known=effect if earlier == "none" else None)
        return effect

    def _step(self, groups: Sequence[Group]) -> Effect | None:
        if not self.steps_left:
            self.open += groups
            return None
        self.steps_left -= 1
        return self.effect(groups)
