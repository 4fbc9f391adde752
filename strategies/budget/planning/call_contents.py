"""The contents of storages that the operators of a call make, read and write over, and their units.

A storage has one content for each write that others have read it before. The write makes the next one of it:
in the same memory, if nobody reads the older one any more. Who reads that later, in backward, gets it made
again in memory of its own. Writes that nobody has read before belong to what makes the content.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from strategies.budget.plan import Value
from strategies.budget.planning.units import Unit, UnitStep
from strategies.step.step_graph import StepOperator


@dataclass(slots=True, eq=False)
class Content:
    """The content of a storage between two writes that others have read it before.

    Fields:
        storage: number of the storage in the step.
        value: its address; `None` of one from outside.
        readers: groups that read it, without its own.
        over: operator that writes over it.
    """

    storage: int
    value: Value | None = None
    readers: list[list[Step]] = field(default_factory=list)
    over: StepOperator | None = None

    def death(self, deaths: Mapping[int, int]) -> int:
        """Return the last moment at which forward has it; of one from outside a copy is held from then on."""
        if self.over is None:
            return deaths[self.storage]
        return self.over.start - (self.value is None)

    def number(self, storages: int) -> int:
        """Return its number in the step: that of the storage, or one of its own below 0.

        Args:
            storages: how many there are in the step.
        """
        if self.over is None:
            return self.storage
        return -1 - self.storage - storages * (self.over.ordinal + (self.over.call << 32))


class Step(NamedTuple):
    """An operator, and the contents that it reads, makes and writes over."""

    operator: StepOperator
    reads: Sequence[Content]
    makes: Sequence[Content]
    over: Sequence[Content]


class Contents:
    """The contents of a call's storages.

    Args:
        operators: its operators.
        parts: whether a write to what others have read makes another content. Where forward itself goes
            backward, it may ask for an older one: each storage has one content there.

    Attributes:
        groups: operators that run together: one that makes contents, with those that write to one of them
            before others read it.
    """

    def __init__(self, operators: Sequence[StepOperator], *, parts: bool) -> None:
        self.groups: list[list[Step]] = []
        self._parts = parts
        self._latest: dict[int, Content] = {}
        self._homes: dict[Content, list[Step]] = {}
        self._spoilt: dict[Content, list[list[Step]]] = {}  # what is written to, and who read it before
        for each in operators:
            self._follow(each)

    def latest(self, storage: int) -> Content:
        """Return what a storage holds."""
        return self._latest.setdefault(storage, Content(storage))

    def numbered(self, asked: Iterable[Content]) -> dict[Content, int]:
        """Return numbers of what is made, read or asked for: from 0 on, and from -1 down from outside."""
        steps = [step for group in self.groups for step in group]
        own = [content for step in steps for content in step.makes]
        used = (*(content for step in steps for content in step.reads), *asked)
        outside = dict.fromkeys(content for content in used if content.value is None)
        numbers = {content: number for number, content in enumerate(own)}
        return numbers | {content: -1 - number for number, content in enumerate(outside)}

    def pinned(self) -> set[Content]:
        """Return what stays where contents are not parted: what is written to, and what its readers make."""
        readers = (step for groups in self._spoilt.values() for group in groups for step in group)
        made = {content for step in readers for content in step.makes}
        return made.union(content for content in self._spoilt if content.value is not None)

    def _follow(self, operator: StepOperator) -> None:
        reads = list(map(self.latest, sorted(operator.reads)))
        written = list(map(self.latest, sorted(operator.writes)))
        own = sorted((each for each in written if each.value is not None), key=attrgetter("value"))
        home = self._home(operator, own)
        group: list[Step] = [] if home is None else home
        makes = [Content(s, Value(operator.ordinal, at, operator.name)) for s, at in operator.makes.items()]
        over = own if home is None else []
        makes += [
            Content(content.storage, Value(operator.ordinal, -1 - at, operator.name))
            for at, content in enumerate(over)
        ]
        if makes or own:  # any other never runs again
            for content in reads:
                if self._homes.get(content) is not group:
                    content.readers.append(group)
            self.groups += [group] if home is None else []
            group.append(Step(operator, reads, makes, over))
        for content in written:
            self._end(content, operator, goes_on=home is not None)
        self._homes |= dict.fromkeys(makes, group)
        self._latest |= {content.storage: content for content in makes}

    def _home(self, operator: StepOperator, own: Sequence[Content]) -> list[Step] | None:
        """Return the group that goes on with an operator, if one does."""
        if not own:
            return None
        goes_on = len(operator.writes) == 1 and not operator.makes and not own[0].readers
        return self._homes[own[0]] if goes_on or not self._parts else None

    def _end(self, content: Content, operator: StepOperator, *, goes_on: bool) -> None:
        """Let an operator write to a content."""
        if not self._parts and content.readers:
            self._spoilt.setdefault(content, []).extend(content.readers)
        elif self._parts and not goes_on:
            content.over = operator
            self._latest.pop(content.storage)


def units_of(
    groups: Iterable[Sequence[Step]], numbers: Mapping[Content, int], nbytes: Mapping[int, int]
) -> Iterator[Unit]:
    """Yield the units of operators that run together, with contents numbered within the program.

    One that writes to what is outside never runs again, if it does not forgo that. Nor does one that reads an
    older content that is not made again.
    """
    lasting: set[Content] = set()
    for group in groups:
        makes = [content for step in group for content in step.makes]
        read = dict.fromkeys(content for step in group for content in step.reads if content not in makes)
        last = {content: step.operator for step in group for content in (*step.makes, *step.reads)}
        own, operators = {content.storage for content in makes}, [step.operator for step in group]
        is_repeatable = all(each.is_repeatable and (each.forgoes or each.writes <= own) for each in operators)
        is_repeatable &= not any(content.over and content in lasting for content in read)
        lasting.update(() if is_repeatable else makes)

        yield Unit(
            name=operators[0].name,
            operators=tuple(each.ordinal for each in operators),
            steps=tuple(
                UnitStep(
                    ordinal=each.ordinal,
                    made_bytes=sum(nbytes[content.storage] for content in step.makes),
                    private_bytes=each.private_bytes,
                    random_states=each.random_states,
                    reads=tuple(numbers[content] for content in read if last[content] is each),
                    made=tuple(numbers[content] for content in makes if last[content] is each),
                    over=tuple(numbers[content] for content in step.over),
                )
                for each, step in zip(operators, group, strict=True)
            ),
            reads=tuple(numbers[content] for content in read),
            makes=tuple(numbers[content] for content in makes),
            flops=sum(each.flops for each in operators),
            seconds=sum(each.seconds for each in operators),
            random_states=sum(each.random_states for each in operators),
            is_repeatable=is_repeatable,
        )
