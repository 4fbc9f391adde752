"""The tape of one call of a block: which operators run, and what autograd saves of what they make."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode
from torch.utils._pytree import tree_map_only

from strategies.base import StrategyError
from strategies.budget.eager.contents import Content, Reading, TapedOperator, freed_reads
from strategies.budget.eager.slice_ticket import SliceTicket
from strategies.budget.plan import BlockPlan, Value, input_value
from strategies.estimate.liveness import key_of
from strategies.estimate.tensors import tensors_in
from strategies.generators import DrawWatch, stashed
from strategies.regions.host_copies import HostLedger
from strategies.regions.inner_units import gather, with_weights_in
from strategies.regions.kept_results import loses_history
from strategies.regions.saved_tensors import Packed, hooks_around, kept, local_of, packed_by
from strategies.regions.versions import PLAIN, Version, alias_inside, version_of
from strategies.step.before_blocks import signature_of
from strategies.step.late_value import KeptTicket
from strategies.step.memory_layout import MemoryLayout, copied, dense_of
from strategies.step.operator_facts import OperatorFacts, drawn_from, facts_of
from strategies.step.operator_order import HELD, NOTED, Entry
from strategies.step.ordered_mode import OrderedMode, storage_of

_CAST = "aten._to_copy.default"

Address: TypeAlias = tuple[int, int]
"""Operator that makes a storage, and number of the result."""


class StorageHome:
    """A storage of a block's forward.

    Attributes:
        maker: number of the operator that makes it; of one from outside that of no operator.
        address: what makes its content; `None` for one from outside that does not wait on the host.
        latest: what it holds.
        tensors: tensors on it whose versions may count apart, where the plan keeps it or it is from outside.
        tickets: what the graph holds for tensors on it.
    """

    __slots__ = ("_copies", "_identity", "address", "latest", "maker", "tensors", "tickets")

    def __init__(self, tensor: Tensor, dense: Tensor, latest: Content, address: Address | None) -> None:
        self._identity: StorageWeakRef | None = None
        self._copies: list[StorageWeakRef] = []
        self.address, self.latest = address, latest
        self.maker = -1 if address is None else address[0]
        self.tensors: list[Tensor] = [tensor]
        self.tickets: list[weakref.ref[SliceTicket]] = []
        latest.memory = dense

    @property
    def holds_memory(self) -> bool:
        """True if it holds the memory of the storage."""
        return self._identity is None

    def hold(self, tensor: Tensor, dense: Tensor) -> None:
        """Hold the memory of `tensor`, which lies on the storage; `dense` is it on this rank."""
        if type(tensor) in PLAIN:
            tensor = dense = alias_inside(tensor)  # which gets no graph
        self._identity, self.tensors, self.latest.memory = None, [tensor], dense

    def let_go(self, dense: Tensor) -> None:
        """Hold no memory; no other storage gets the address of this one."""
        self._identity = StorageWeakRef(dense.untyped_storage())
        self.tensors, self.latest.memory = [], None

    def also_on(self, copy: Tensor) -> None:
        """Take note of a storage with the same content: no other one gets its address, either."""
        self._copies.append(StorageWeakRef(copy.untyped_storage()))

    def is_dead(self) -> bool:
        """Say whether nobody has its memory, which it does not hold: nothing reads it any more."""
        return self._identity is not None and bool(self._identity.expired())

    def is_read(self) -> bool:
        """Say whether an operator that may run again reads what it holds."""
        content = self.read_later()
        if content is not None:
            self.latest = content
        return content is not None

    def update_tickets(self) -> None:
        """Let tickets stand for what it holds now, where autograd has counted no write since."""
        for ticket in filter(None, (reference() for reference in self.tickets)):
            ticket.follow(self.latest)

    def read_later(self) -> Content | None:
        """Let go of what it holds, and return it if it is read in backward."""
        reference = weakref.ref(self.latest)
        del self.latest
        return reference()


class Write(NamedTuple):
    """A write to a storage: its home, a tensor on it, and the address of what it holds from then on."""

    home: StorageHome
    tensor: Tensor
    address: Address | None


@dataclass(frozen=True, slots=True)
class Fates:
    """A block's plan, for a look at each operator.

    Fields:
        plan: the plan.
        names: names of the operators that it names.
        held: addresses of storages that are kept or offloaded.
        stays: addresses of those that are never made again.
        on_host: addresses of those that are offloaded.
        drops: numbers of requests after which storages are dropped, by address; none: after each.
        begun: addresses of contents that a write begins; another write goes on with what is there.
    """

    plan: BlockPlan
    names: Mapping[int, str]
    held: AbstractSet[Address]
    stays: AbstractSet[Address]
    on_host: AbstractSet[Address]
    drops: Mapping[Address, tuple[int, ...]]
    begun: AbstractSet[Address] = frozenset()

    @classmethod
    def of(cls, plan: BlockPlan) -> Fates:
        """Return the fates that `plan` decides."""
        held = frozenset(map(_address, (*plan.keep, *plan.offload)))
        drops = {(each.operator, each.result): each.after for each in plan.drop}
        anew = frozenset(map(_address, plan.again)) - held
        dropped = (each.value for each in plan.drop)
        named = (*plan.keep, *plan.offload, *plan.recompute, *plan.again, *dropped)
        return cls(
            plan=plan,
            names={each.operator: each.name for each in named},
            held=held,
            stays=held - drops.keys(),
            on_host=frozenset(map(_address, plan.offload)),
            drops=drops | dict.fromkeys(anew, ()),
            begun=frozenset(_address(value) for value in named if value.is_written),
        )

    def until(self, count: int) -> Fates:
        """Return the fates of inputs and of what the first `count` operators make; the rest is recomputed."""

        def first(addresses: AbstractSet[Address]) -> AbstractSet[Address]:
            return frozenset(address for address in addresses if address[0] < count)

        return Fates(
            plan=replace(self.plan, operators=0),
            names={},
            held=first(self.held),
            stays=first(self.stays),
            on_host=first(self.on_host),
            drops={address: self.drops[address] for address in first(self.drops.keys())},
            begun=self.begun,
        )


class BlockTape(OrderedMode):
    """Notes each operator of a block's forward, and gives tickets for what autograd saves.

    Args:
        fates: what is kept, and what waits on the host.
        ledger: the host copies of the model.
        region: who answers for their bytes.
        is_exact: refuse operators that were not planned; what follows them is recomputed else.

    Attributes:
        is_as_planned: whether forward has had the planned operators.
        units: units of FSDP2 inside of the block.
        waits: whether it follows several modules.
        may_be_first: whether a module may run for the first time, and leave a plan that it must have.
        refusal: why it is refused then, unless it has made what later calls find.
        is_first: whether it has.
    """

    def __init__(self, fates: Fates, ledger: HostLedger, region: Any, *, is_exact: bool = True) -> None:
        super().__init__()
        self._fates, self._ledger, self._region = fates, ledger, region
        self._is_exact = is_exact
        self.is_as_planned = True
        self.may_be_first = self.is_first = False
        self.refusal: StrategyError | None = None
        self.units: Sequence[FSDPModule] = ()
        self._enclosing: Any = hooks_around()
        self._end_early: Callable[[], None] | None = None
        self._handed_on: dict[int, int] = {}
        self._seen: list[tuple[Tensor, int]] = []
        self._is_before = self._is_idle = self._is_spoilt = False
        self._skipped = self._first = 0
        self._homes: dict[int, StorageHome] = {}
        self._written_homes: list[StorageHome] = []
        self._older: list[Content] = []  # what a write of the module that runs has parted
        self.waits = len(fates.plan.modules) > 1
        self._pause.made_again = self._take_back

    def offer(self, inputs: Iterable[Tensor]) -> None:
        """Take over the inputs of the block that wait on the host; call it before the block runs."""
        for number, tensor in enumerate(inputs):
            address = _address(input_value(number))
            dense = dense_of(tensor) if address in self._fates.on_host else None
            if dense is not None:
                self._homes[key_of(dense)] = StorageHome(tensor, dense, Content(None), address)

    def pause(self, results: Iterable[Tensor], end_early: Callable[[], None]) -> None:
        """Wait for the next module of the call.

        Args:
            results: what the module before it has returned.
            end_early: ends the call, if backward asks for something of it before.
        """
        self._end_early = end_early
        self._handed_on = {}
        for tensor in results:
            home = self._homes.get(storage_of(tensor) or 0)
            if home is not None and not self._stays(home.address):
                self._handed_on[storage_of(tensor) or 0] = tensor._version  # noqa: SLF001 (as autograd counts it)
        outside = (each for home in self._homes.values() if home.address is None for each in home.tensors)
        self._seen = [(each.detach(), each._version) for each in outside]  # noqa: SLF001 (as above)

    def resume(self, inputs: Iterable[Tensor]) -> None:
        """Go on with the next module of the call; call it before the module runs.

        Raises:
            StrategyError: what the module before it has made was written to since.
        """
        self._end_early = None
        self._enclosing = hooks_around()
        self._require_unwritten()
        self.admit(inputs)
        for tensor in inputs:
            version = self._handed_on.get(storage_of(tensor) or 0)
            if version not in {None, tensor._version}:  # noqa: SLF001 (as above)
                fqn = self._fates.plan.fqn
                problem = f"an input of {fqn!r} was written to in place after its plan had seen it made"
                raise StrategyError("ac", f"{problem}, so that it cannot be made again; write to a copy")
        self._handed_on = {}

    def _require_unwritten(self) -> None:
        """See that what a module has read is as it was when it ended.

        Raises:
            StrategyError: it was written to since.
        """
        read, self._seen = self._seen, []
        if any(tensor._version != version for tensor, version in read):  # noqa: SLF001 (as above)
            problem = (
                f"what a module of {self._fates.plan.fqn!r} has read was written to in place before the next"
            )
            raise StrategyError("ac", f"{problem}, so that it cannot be made again; write to a copy")

    def follows(self, module: nn.Module) -> None:
        """Take note that the operators from now on are those of `module`."""
        del module
        self._first = self._count

    def gatherable(self) -> Sequence[FSDPModule]:
        """Return the units of FSDP2 whose freed weights operators may read that run again."""
        return self.units

    def begin_before(self) -> None:
        """Follow the operators before the block, until `reach` ends it."""
        self._is_before = True
        self.__enter__()

    def reach(self, module: nn.Module, inputs: Iterable[Tensor], *, is_exact: bool) -> bool:
        """Go on with the block itself; say whether all was as planned before it.

        Args:
            module: the block.
            inputs: what it is called with.
            is_exact: refuse operators of the block that were not planned.
        """
        del module
        if not self.end_before() or self._is_spoilt or self._count != len(self._fates.plan.before):
            return False
        homes = (self._homes.get(storage_of(each) or 0) for each in inputs)
        if all(home is None or home.address is None for home in homes):
            return False
        self._is_exact = is_exact
        self._enclosing = hooks_around()
        return True

    def end_before(self) -> bool:
        """Follow no operators before the block any more; say whether all were as planned."""
        if not self._is_before:
            return False
        if _get_current_dispatch_mode() is not self:
            self._is_idle = True  # until a mode of somebody else has ended
            return False
        self._is_before = False
        self.__exit__(None, None, None)
        return not self._is_idle

    def hand_on(self, results: Iterable[Tensor]) -> None:
        """Take note of the results of the block: nobody makes them again."""

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that plans count, and note it."""
        facts = facts_of(func)
        if loses_history(func, args, kwargs):
            fqn = self._fates.plan.fqn
            raise StrategyError(
                "ac",
                f"{func} in {fqn!r} writes to views, and torch loses that where a tape follows operators; "
                "write to one tensor at a time, plan again, or use ac=full",
            )
        if self._is_idle:
            return func(*args, **kwargs)
        if self._is_before and self._passes(facts, (args, kwargs)):
            changed = map(storage_of, tensors_in(list(facts.written(args, kwargs))))
            self._is_spoilt |= any(each in self._homes for each in changed)
            return func(*args, **kwargs)
        self._require_planned(facts)
        written = self._written(facts, args, kwargs) if facts.writes else []
        is_held = self._is_held(facts, written)
        noted = _aliases if facts.is_collective else _itself
        forgoes = all(each.address is None for each in written) and facts.forgoes(args, kwargs)
        again = facts.without_writes(args, kwargs) if forgoes else (args, kwargs)
        readings = ([], {}) if is_held else map(self._read, noted(again))
        operator = TapedOperator(self._count, facts.name, func, *readings)
        operator.is_collective = facts.is_collective
        self._count += 1
        if facts.draws(args, kwargs) and not is_held:
            operator.stash = stashed(drawn_from(args, kwargs))
        for each in written:
            self._write(None if is_held or forgoes else operator, facts, each, written)
        is_watched = facts.is_untagged and not is_held and self._fakes is None
        watch = DrawWatch(each.device for each in tensors_in((args, kwargs))) if is_watched else None
        result = func(*args, **kwargs)
        if watch is not None:
            operator.stash = watch.stash()
        self._take(operator, facts, noted(result))
        if not is_held and (operator.has_made or self._has_inner(written)):
            operator.note_readings()
        return result

    def note_ordered(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator of the order, and note it: briefly, where it only makes tensors of others."""
        _, call, number, how, facts = entry
        if how == NOTED or (facts.is_random and facts.draws(args, kwargs)):
            return self.note(entry.operator, args, kwargs)
        operator = None
        if how != HELD:
            read = [self._read(each) for each in args]
            operator = TapedOperator(number, facts.name, call, read, self._read(kwargs) if kwargs else {})
        result = call(*args, **kwargs)
        self._count = number + 1
        for position, tensor in enumerate((result,) if type(result) is Tensor else tensors_in(result)):
            dense = dense_of(tensor)
            if dense is not None and key_of(dense) not in self._homes:
                self._make(operator, (number, position), tensor, dense)
        if operator is not None and operator.has_made:
            operator.note_readings()
        return result

    def _passes(self, facts: OperatorFacts, operands: Any) -> bool:
        """Say whether an operator before the block is none of the plan's."""
        before = self._fates.plan.before
        if self._count == len(before) or signature_of(facts.name, operands) != before[self._count].signature:
            return True
        self._skipped += 1
        if self._skipped <= before[self._count].skips:
            return True
        self._skipped = 0
        return False

    def pack(self, saved: Tensor) -> Packed:
        """Return what the graph holds for `saved`."""
        is_plain = type(saved) in PLAIN
        dense = dense_of(saved)
        key = 0 if dense is None else key_of(dense)
        home = self._homes.get(key)
        if dense is None or home is None or home.address is None:
            if dense is not None and not self.prove_outside(dense):
                self.leave_order()
            if is_plain and self._enclosing is None:
                return kept(saved)
            with self._pause:
                return packed_by(self._enclosing, saved)
        if self._writer is not None:
            self._writer.asks(home.address[0])
        if is_plain and self._keeps(home.address):
            held = KeptTicket(saved)
            if home.maker >= self._first:
                self._saved.add(held, key)
            return held
        if is_plain:
            version = version_of(saved)
        else:
            with self._pause:
                version = version_of(saved)
        layout = MemoryLayout.of(saved, dense)
        ticket = SliceTicket(home.latest, layout, version, self._pause, saved.device)
        home.tickets.append(weakref.ref(ticket))
        if home.maker >= self._first:
            self._saved.add(ticket, key)
        return self._redeemer(ticket)

    def _keeps(self, address: Address) -> bool:
        """Say whether a value is on the device until it is redeemed, and nobody waits for other modules."""
        return not self.waits and address in self._fates.stays and address not in self._fates.on_host

    def _redeemer(self, ticket: SliceTicket) -> Packed:
        """Return what redeems a ticket."""
        if self.gatherable():
            ticket.before = partial(self._gather, weakref.ref(ticket), ticket.before)
        return partial(self._give, ticket) if self.waits else ticket

    def _give(self, ticket: SliceTicket) -> Tensor:
        """Return what backward gets for a ticket; a call that waits for its other modules ends."""
        if self._end_early is not None:
            self._end_early()
        return ticket()

    def _gather(
        self, reference: weakref.ref[SliceTicket], before: Callable[[], object] | None
    ) -> Callable[[], None] | None:
        """Gather the units inside of the block whose freed weights operators would read.

        The plan was made where they are no units then, and does not know when they have their weights.

        Returns:
            What frees them again; `None` where none is gathered.
        """
        if before is not None:
            before()
        ticket = reference()
        freed = freed_reads(ticket.content) if ticket is not None and ticket.content is not None else ()
        if not freed:
            return None
        with self._pause:
            return gather(with_weights_in(freed, self.gatherable()))

    def finish(self) -> None:
        """Let go of everything but what tickets need.

        Raises:
            StrategyError: forward was not the planned one.
        """
        self._pause.made_again = None
        self._count = self._counted()
        problem = self._end_of_plan() if self.is_as_planned else None
        if problem is not None:
            self._leave_plan(problem)
        if self._writer is not None and self.is_as_planned:
            self.order = self._writer.order(self._fates.stays, self._written_homes, self._count)
        for home in self._written_homes:
            home.update_tickets()
        self._written_homes, self._older = [], []
        every = dict.fromkeys(self._homes.values())  # one may be known by several storages
        homes = [home for home in every if home.address is None or home.address in self._fates.held]
        del every
        self._homes = {}
        for home in homes:
            self._settle(home)

    def finish_early(self) -> None:
        """Finish a call that has not come to all of its modules."""
        self._end_early = None
        self._require_unwritten()
        self._is_exact = False
        with torch.no_grad(), self._pause:
            self.finish()

    def close(self) -> None:
        """Hold nothing more: the graph holds `pack`."""
        self._pause.made_again = None
        self._homes = {}
        self._written_homes, self._older = [], []
        self._saved.clear()
        self._enclosing = None
        self.close_order()

    def follow(self, detached: Tensor) -> None:
        """Note a tensor with a version of its own, such as factories of Python return."""
        dense = dense_of(detached)
        home = None if dense is None else self._homes.get(key_of(dense))
        if home is not None and home.address in self._fates.held:
            is_plain = type(detached) in PLAIN
            home.tensors.append(alias_inside(detached) if is_plain else detached)  # as in `_make`

    def _require_planned(self, facts: OperatorFacts) -> None:
        """See that the operator that runs now is the planned one.

        Raises:
            StrategyError: it must be and is not, or it cannot be followed.
        """
        planned = self._fates.names.get(self._count)
        if planned is not None and planned != facts.name:
            self._leave_plan(
                f"operator {self._count} is {facts.name} and was {planned}{_of_autocast(planned)}"
            )
        if facts.moves_memory:
            problem = "moves memory between tensors, which no plan follows"
            raise StrategyError("ac", f"{facts.name} in {self._fates.plan.fqn!r} {problem}")

    def _read(self, value: Any) -> Any:
        """Return arguments with readings in place of tensors."""
        if isinstance(value, Tensor):
            dense = dense_of(value)
            if dense is None:
                return value.detach()  # held as it is: nothing is known of its memory
            return self._reading(value, dense)
        if isinstance(value, dict):
            return {name: self._read(each) for name, each in value.items()}
        return [self._read(each) for each in value] if isinstance(value, list | tuple) else value

    def _reading(self, tensor: Tensor, dense: Tensor) -> Reading:
        home = self._home_of_operand(tensor, dense)
        return Reading(home.latest, MemoryLayout.of(tensor, dense))

    def _home_of_operand(self, tensor: Tensor, dense: Tensor) -> StorageHome:
        """Return the home of what the operator that runs now reads or writes to."""
        home = self._home(tensor, dense)
        if self._writer is not None:
            self._writer.reads(self._count, home, home.address and home.address[0])
        return home

    def _home(self, tensor: Tensor, dense: Tensor) -> StorageHome:
        key = key_of(dense)
        home = self._homes.get(key)
        if home is None:
            self.is_in_order &= self.prove_outside(dense)
            home = self._homes[key] = StorageHome(tensor, dense, Content(None), None)
        return home

    def _take_back(self, content: Content, tensor: Tensor) -> None:
        """Know a value that forward itself asks for by its home, also where it was made again."""
        dense = dense_of(tensor)
        home = next((each for each in self._homes.values() if each.latest is content), None)
        if dense is not None and home is not None and key_of(dense) not in self._homes:
            self._homes[key_of(dense)] = home
            home.also_on(dense)

    def _written(self, facts: OperatorFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Write]:
        """Return the storages that an operator writes to, once each."""
        found: dict[StorageHome, Tensor] = {}
        for tensor in tensors_in(list(facts.written(args, kwargs))):
            dense = dense_of(tensor)
            if dense is None:
                kind = type(tensor).__name__
                raise StrategyError(
                    "ac",
                    f"{facts.name} in {self._fates.plan.fqn!r} writes to a {kind}, which no plan follows",
                )
            found.setdefault(self._home_of_operand(tensor, dense), tensor)
        own = sorted(home.address for home in found if home.address is not None)
        begun = {address: (self._count, -1 - place) for place, address in enumerate(own)}
        begun = {each: address for each, address in begun.items() if address in self._fates.begun}
        return [
            Write(home, tensor, home.address and begun.get(home.address, home.address))
            for home, tensor in found.items()
        ]

    def _is_held(self, facts: OperatorFacts, written: Iterable[Write]) -> bool:
        """Say whether what the operator that runs now makes and writes to is there: nothing asks for it."""
        stays = self._fates.stays
        for result in range(facts.makes):
            if (self._count, result) not in stays:
                return False
        return not (facts.makes_list or self._has_inner(written))

    def _has_inner(self, written: Iterable[Write]) -> bool:
        """Say whether a write makes what is made again where it is needed."""
        return any(not self._stays(each.address) for each in written)

    def _stays(self, address: Address | None) -> bool:
        """Say whether a content is never made again: it is from outside, kept or offloaded."""
        return address is None or address in self._fates.stays

    def _write(
        self, operator: TapedOperator | None, facts: OperatorFacts, write: Write, written: Iterable[Write]
    ) -> None:
        """Begin another content, before an operator writes to a storage; copy an older one that is read.

        Args:
            operator: what may run again; `None` where all that it writes to is held.
            facts: what is known of it.
            write: the write.
            written: all of its writes.
        """
        home, newer = write.home, self._content(operator, write.address)
        older = self._begin(home, newer)
        memory = newer.memory
        if write.address != home.address:
            self._part(write, older)
        if operator is not None:
            operator.writes(older, newer)
        if memory is None or older.maker is not None:
            return
        runs_again = operator is not None and (bool(facts.makes) or self._has_inner(written))
        if older.readings or (runs_again and not facts.is_untold):
            older.memory = copied(memory)
        elif facts.is_untold:
            older.fetch = partial(copied, memory)  # the operator may write to it once more

    def _begin(self, home: StorageHome, newer: Content) -> Content:
        """Let a storage hold another content, which an operator writes; return the one before."""
        self._written_homes.append(home)
        older, home.latest = home.latest, newer
        older.give_way(newer)
        if home.holds_memory:  # else what is there was made again
            newer.memory, older.memory = older.memory, None
        return older

    def _part(self, write: Write, older: Content) -> None:
        """Let the content that a write begins have a fate of its own; who makes the older one lives on."""
        home, tensor, address = write
        assert address is not None, "only what the block makes is parted"
        self._older.append(older)
        home.address = address
        home.latest.drop_after(self._fates.drops.get(address))
        dense = dense_of(tensor)
        assert dense is not None, "it has a storage"
        if address not in self._fates.held:
            home.let_go(dense)
        elif not home.holds_memory:
            home.hold(tensor, dense)

    def _content(self, operator: TapedOperator | None, address: Address | None) -> Content:
        """Return a content that an operator makes, if it may run again for that."""
        return Content(None if self._stays(address) else operator)

    def _take(self, operator: TapedOperator, facts: OperatorFacts, result: Any) -> None:
        """Note the storages that an operator has made."""
        for number, tensor in enumerate(tensors_in(result)):
            dense = dense_of(tensor)
            if dense is None:
                continue
            home = self._homes.get(key_of(dense))
            if home is None:
                self._make(operator, (operator.number, number), tensor, dense)
            elif facts.is_fresh:  # a mode below has run it in place
                self._begin(home, self._content(operator, home.address))
                operator.makes(number, home.latest)

    def _make(self, operator: TapedOperator | None, address: Address, tensor: Tensor, dense: Tensor) -> None:
        """Note a storage that an operator has made; `None`: all that it makes is held."""
        content = self._content(operator, address)
        if operator is not None:
            content.drop_after(self._fates.drops.get(address))
            operator.makes(address[1], content)
        home = self._homes[key_of(dense)] = StorageHome(tensor, dense, content, address)
        if address in self._fates.held:
            home.hold(tensor, dense)
        else:
            home.let_go(dense)

    def _settle(self, home: StorageHome) -> None:
        """Hold a storage for those that read it in backward."""
        content = home.read_later()
        if content is None:
            return
        tensors = [
            each.detach() for each in home.tensors
        ]  # shares its version; one with a graph is never freed
        tensor = tensors[0]
        local = local_of(tensor)
        if local is None:  # on the meta device
            local = dense_of(tensor)
        content.memory = local
        content.versions = tuple(
            Version(counter=each, expected=each._version)  # noqa: SLF001 (as autograd checks it)
            for each in tensors
        )
        if home.address in self._fates.on_host and local is not None:
            content.versions = tuple(map(version_of, tensors))
            copy = self._ledger.copy_of(local, content.versions[0], self._region)
            content.memory, content.on_host = None, partial(self._ledger.taken, copy)

    def _end_of_plan(self) -> str | None:
        """Return how a forward that ends here is not the planned one; `None` where it is."""
        plan = self._fates.plan
        if plan.operators and self._count != plan.operators:
            return f"its forward has {self._count} operators and had {plan.operators}"
        made = {home.address for home in self._homes.values()}
        missing = (value for value in (*plan.keep, *plan.offload) if _address(value) not in made)
        return next((f"its forward has no {value}" for value in missing), None)

    def _leave_plan(self, problem: str) -> None:
        """Keep what was kept so far, and recompute what follows.

        Raises:
            StrategyError: forward must be the planned one.
        """
        if self._is_exact:
            remedy = "a plan is for one forward; plan a step with data (Budget.write_plan), or use ac=nested"
            self.refusal = StrategyError(
                "ac", f"{self._fates.plan.fqn!r} is not as it was planned: {problem}; {remedy}"
            )
            if not self.may_be_first:
                raise self.refusal
            self._is_exact = False
        self.is_as_planned = False
        self._fates = self._fates.until(self._count)


def _aliases(values: Any) -> Any:
    """Return `values` on tensors of their own: who holds a collective's says whether gloo is done."""
    with _disable_current_modes(), torch.no_grad():
        return tree_map_only(Tensor, torch.Tensor.detach, values)


def _itself(values: Any) -> Any:
    return values


def _of_autocast(planned: str) -> str:
    """Return why a cast of a weight may be missing."""
    if planned != _CAST or not torch.is_autocast_cache_enabled():
        return ""
    remedy = "use a scope for each, or cache_enabled=False"
    return f"; autocast casts a weight once for all forwards of its scope: {remedy}"


def _address(value: Value) -> Address:
    return value.operator, value.result
