"""The tapes of a group: blocks whose forward runs again as one, and then each by its own plan."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from strategies.base import StrategyError
from strategies.budget.eager.block_tape import Address, BlockTape, Fates, StorageHome, Write
from strategies.budget.eager.contents import Content, TapedOperator, below_autograd, needed_operators
from strategies.budget.eager.slice_ticket import SliceTicket
from strategies.estimate.liveness import key_of
from strategies.estimate.recomputing import recomputing
from strategies.regions.host_copies import HostLedger
from strategies.regions.inner_units import gather, units_of
from strategies.regions.saved_tensors import Packed
from strategies.step.memory_layout import dense_of

_LINK: Address = (-2, 0)
"""Address of a storage that the block before makes."""

References: TypeAlias = list[weakref.ref[Content]]


class Group:
    """The blocks of one group of a model, which its regions share.

    Args:
        fqns: its blocks, in the order of forward.
    """

    def __init__(self, fqns: Sequence[str]) -> None:
        self._numbers = {fqn: number for number, fqn in enumerate(fqns)}
        self._second = SecondForward()

    def tape(
        self, fates: Fates, ledger: HostLedger, region: Any, module: nn.Module, *, is_exact: bool
    ) -> GroupedTape:
        """Return the tape of a block that begins its forward; one that comes too early begins anew.

        `module` is the block, or what calls it.
        """
        number = self._numbers[fates.plan.fqn]
        if number <= self._second.latest or self._second.has_run:
            self._second = SecondForward()
        self._second.latest = number
        is_last = number == len(self._numbers) - 1
        tape = GroupedTape(fates, ledger, region, is_exact=is_exact, second=self._second, is_last=is_last)
        self._second.members.append(Member(module=weakref.ref(module)))
        if is_last:
            self._second = SecondForward()
        return tape


@dataclass(kw_only=True, slots=True)
class Member:
    """One block in a second forward.

    Fields:
        module: the block.
        wanted: what it shall make: links to the next block, and what it keeps from then on.
        tickets: what the graph holds of it.
    """

    module: weakref.ref[nn.Module]
    wanted: References = field(default_factory=list)
    tickets: list[weakref.ref[SliceTicket]] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class Link:
    """A storage that a block hands on: what it holds, and the version of the tensor on it."""

    home: StorageHome
    version: int


class SecondForward:
    """The forward that runs again, once, when backward reaches a group.

    Attributes:
        latest: number of the block that has begun last; -1: none has.
        members: its blocks, in the order of forward.
        links: what the block that has ended last hands on, by identity of the storage.
        has_run: whether backward has reached the group.
    """

    def __init__(self) -> None:
        self.latest = -1
        self.members: list[Member] = []
        self.links: dict[int, Link] = {}
        self.has_run = False

    def run(self) -> None:
        """Run the blocks again, from the input of the first, where this has not happened.

        Raises:
            StrategyError: something that they read was changed since.
        """
        if self.has_run:
            return
        self.has_run = True
        with recomputing():
            for member in self.members:
                with _gathered(member.module()), below_autograd():
                    _run_again(member)
        self.members = []


class GroupedTape(BlockTape):
    """The tape of a block in a group, which keeps nothing in forward.

    Args:
        fates: what the block keeps from the second forward on.
        ledger, region: as those of any tape.
        is_exact: as of any tape.
        second: the second forward of the group.
        is_last: whether nobody reads what it hands on.
    """

    def __init__(
        self,
        fates: Fates,
        ledger: HostLedger,
        region: Any,
        *,
        is_exact: bool,
        second: SecondForward,
        is_last: bool,
    ) -> None:
        super().__init__(
            replace(fates, held=frozenset(), stays=frozenset()), ledger, region, is_exact=is_exact
        )
        self._later, self._second, self._is_last = fates.held, second, is_last
        self._is_open = True
        self._tickets: list[weakref.ref[SliceTicket]] = []

    def offer(self, inputs: Iterable[Tensor]) -> None:
        """Take over what the block before hands on; call it before the block runs.

        Raises:
            StrategyError: it was written to since.
        """
        for tensor in inputs:
            dense = dense_of(tensor)
            link = None if dense is None else self._second.links.get(key_of(dense))
            if dense is None or link is None or key_of(dense) in self._homes:
                continue
            if tensor._version != link.version:  # noqa: SLF001 (as autograd counts it)
                fqn = self._fates.plan.fqn
                problem = f"the input of {fqn!r} was written to in place after the block before had made it"
                raise StrategyError(
                    "ac", f"{problem}; a plan with groups cannot make it again; write to a copy"
                )
            home = StorageHome(tensor, dense, link.home.latest, _LINK)
            home.let_go(dense)
            self._homes[key_of(dense)] = home
            self._second.members[-2].wanted.append(weakref.ref(home.latest))

    def resume(self, inputs: Iterable[Tensor]) -> None:
        """Go on with the next module of the call, and take over what the block before hands on to it."""
        given = list(inputs)
        super().resume(given)
        self.offer(given)

    def reach(self, module: nn.Module, inputs: Iterable[Tensor], *, is_exact: bool) -> bool:
        """Go on with the block itself; say whether all was as planned before it."""
        self._second.members[-1].module = weakref.ref(module)
        return super().reach(module, inputs, is_exact=is_exact)

    def hand_on(self, results: Iterable[Tensor]) -> None:
        """Take note of what the next block may read; call it when the block has run."""
        links: dict[int, Link] = {}
        for tensor in () if self._is_last else results:
            dense = dense_of(tensor)
            home = None if dense is None else self._homes.get(key_of(dense))
            if dense is not None and home is None and not self.prove_outside(dense):
                self.leave_order()
            if dense is not None and home is not None and home.address not in {None, _LINK}:
                links[key_of(dense)] = Link(home=home, version=tensor._version)  # noqa: SLF001 (as above)
        self._second.links = links

    def finish(self) -> None:
        """Let go of everything but what tickets need, and say what the second forward shall make.

        What is handed on belongs to it where the next block takes it over.
        """
        kept = [home.latest for home in self._homes.values() if home.address in self._later]
        member = self._second.members[-1]
        member.wanted = [weakref.ref(content) for content in kept]
        member.tickets = self._tickets
        if self._writer is not None:
            made = (link.home.address for link in self._second.links.values())
            for operator, _ in (*self._later, *filter(None, made)):
                self._writer.asks(operator)
        super().finish()

    def close(self) -> None:
        """Hold nothing more: the graph holds `pack`."""
        super().close()
        self._is_open = False

    def _redeemer(self, ticket: SliceTicket) -> Packed:
        self._tickets.append(weakref.ref(ticket))
        ticket.before = self._run_second
        return super()._redeemer(ticket)

    def _run_second(self) -> None:
        if not self._is_open:
            with torch.no_grad(), self._pause:
                self._second.run()

    def _write(
        self, operator: TapedOperator | None, facts: Any, write: Write, written: Iterable[Write]
    ) -> None:
        if write.home.address == _LINK:
            problem = (
                f"{self._fates.plan.fqn!r} writes to its input in place, which the block before has made"
            )
            raise StrategyError("ac", f"{problem}; a plan with groups cannot make it again; write to a copy")
        super()._write(operator, facts, write, written)


def _run_again(member: Member) -> None:
    """Run what a member's wanted contents need, and keep what runs once more later.

    Raises:
        StrategyError: something that it reads was changed since.
    """
    wanted = [content for reference in member.wanted if (content := reference()) is not None]
    waiting = needed_operators(
        [content for content in wanted if not content.is_at_hand()], refuse=_refuse_emptied
    )
    ends = frozenset(map(id, wanted))
    tickets = (ticket for reference in member.tickets if (ticket := reference()) is not None)
    asked = [
        content for ticket in tickets if (content := ticket.content) is not None and id(content) not in ends
    ]
    later = {id(operator) for operator in needed_operators(asked, ends, _refuse_emptied).values()}
    del asked, wanted
    reads = Counter(id(r.content) for operator in waiting.values() for r in operator.readings() if r.content)
    passing: dict[int, weakref.ref[Content]] = {}
    for number in sorted(waiting):
        _run_one(waiting.pop(number), ends, later, reads, passing)


def _run_one(
    operator: TapedOperator,
    ends: frozenset[int],
    later: set[int],
    reads: Counter[int],
    passing: dict[int, weakref.ref[Content]],
) -> None:
    """Run one operator of a second forward, and drop what it was the last to read there.

    Args:
        operator: the operator.
        ends: identities of what stays after the second forward.
        later: identities of operators that run once more.
        reads: how often those that wait read each content.
        passing: what is there for the second forward alone, by identity.
    """
    read = [id(reading.content) for reading in operator.readings() if reading.content]
    if id(operator) in later:
        for content, memory in operator.rehearse(frozenset(passing)):
            if id(content) in ends:
                content.fill(memory)
            elif reads[id(content)]:
                content.memory = memory
                passing[id(content)] = weakref.ref(content)
    else:
        operator.run()
    for each in read:
        reads[each] -= 1
        if not reads[each] and each in passing:
            passed = passing.pop(each)()
            if passed is not None:
                passed.memory = None


def _refuse_emptied(content: Content, reader: TapedOperator) -> None:
    """Refuse to read what has lost its memory since forward.

    Raises:
        StrategyError: naming the operator.
    """
    memory = content.memory
    if memory is not None and memory.numel() and not memory.untyped_storage().nbytes():
        problem = f"{reader.name} of a group reads a parameter that sharding has taken away after forward"
        raise StrategyError("ac.plan", f"{problem}; make the plan on this mesh, or shard each block by FSDP2")


@contextmanager
def _gathered(module: nn.Module | None) -> Iterator[None]:
    """Gather the parameters of a block that FSDP2 has sharded after its forward, and shard them again."""
    give_back = gather(() if module is None else units_of(module))
    try:
        yield
    finally:
        give_back()
