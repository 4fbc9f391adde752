"""Fates of values by the names of the modules and operators that make them, without a plan.

A plan numbers the operators of one forward. Names need none: each operator is judged when it runs, by the
modules that forward is in. So a block may run other operators in each step, as experts do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule

from strategies.base import Observation
from strategies.budget.eager.block_tape import Address, BlockTape, Fates, StorageHome
from strategies.budget.eager.contents import Content
from strategies.budget.eager.planned_block import refuse_compiled
from strategies.budget.plan import BlockPlan
from strategies.estimate.liveness import key_of
from strategies.estimate.tensors import tensors_in
from strategies.regions import blocks, region
from strategies.regions.fates import EVERY_OPERATOR, Fate, Rules
from strategies.regions.host_copies import HostLedger
from strategies.regions.inner_units import gather, inner_units
from strategies.regions.saved_tensors import Packed, packing
from strategies.step.memory_layout import dense_of
from strategies.step.operator_facts import OperatorFacts, facts_of
from strategies.step.ordered_mode import storage_of


@dataclass(kw_only=True, slots=True, eq=False)
class NamedModule:
    """The region of a module inside a block whose operators have rules of their own.

    Fields:
        place: the place of the block's forward.
        rules: the rules.
    """

    place: Place
    rules: Rules

    def __call__(
        self,
        module: nn.Module,  # noqa: ARG002 (`body` is bound to it)
        body: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return `body(*args, **kwargs)`."""
        self.place.modules.append(self)
        try:
            return body(*args, **kwargs)
        finally:
            self.place.modules.pop()

    def observe(self) -> Observation:
        """Return what the place has seen."""
        return self.place.observe()


@dataclass(kw_only=True, slots=True, eq=False)
class Place:
    """The modules that the forward of a block is in.

    Fields:
        base: rules of what is made in no module with rules of its own; that of all operators is last.
        ledger: the host copies of the model.
        named: patterns of modules and operators that a person has given.
        modules: the modules with rules that forward is in, the innermost last.
        fired: patterns that have matched, those of operators in any step.
    """

    base: Rules
    ledger: HostLedger
    named: tuple[str, ...]
    modules: list[NamedModule] = field(default_factory=list)
    fired: set[str] = field(default_factory=set)

    def fate_of(self, operator: str) -> Fate:
        """Return the fate of what `operator` makes here."""
        for rules in (*(each.rules for each in reversed(self.modules)), self.base):
            for pattern, fate in rules:
                if pattern == EVERY_OPERATOR:
                    return fate
                if fnmatchcase(operator, pattern):
                    self.fired.add(pattern)
                    return fate
        raise AssertionError("the last rule is of every operator")

    def decider(self) -> NamedModule | None:
        """Return the module that decides about all operators here; `None` where none does."""
        deciding = (each for each in reversed(self.modules) if each.rules[-1][0] == EVERY_OPERATOR)
        return next(deciding, None)

    def observe(self) -> Observation:
        """Return the bytes that the latest step moved, and patterns of operators that have never matched."""
        never = tuple(pattern for pattern in self.named if pattern not in self.fired)
        return Observation(named=self.named, never_fired=never, offloaded_bytes=self.ledger.offloaded_bytes)


@dataclass(kw_only=True, slots=True, eq=False)
class NamedBlock:
    """The region of a block in which names decide.

    Saved: what is kept, and what operators read that run again.
    Recomputed: the operators that lead to the other values that backward needs, each once.
    Moved: what is offloaded, once to the host and once back.

    Fields:
        fqn: name of the block, for errors.
        place: the place of its forward.
    """

    fqn: str
    place: Place
    _units: list[FSDPModule] | None = None

    def __call__(
        self, module: nn.Module, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return `body(*args, **kwargs)`.

        Raises:
            StrategyError: it is compiled.
        """
        refuse_compiled(self.fqn, module)
        if not torch.is_grad_enabled():
            return body(*args, **kwargs)
        self.place.ledger.begin_forward()
        tape = NamedTape(self)
        try:
            with packing(tape.pack), tape:
                results = body(*args, **kwargs)
            tape.finish()
        finally:
            tape.close()
        if self._units is None:
            self._units = inner_units(module)
        if self._units:
            _gather_before_backward(self._units, results)
        return results

    def observe(self) -> Observation:
        """Return what the place has seen."""
        return self.place.observe()


def enclose(
    found: Mapping[str, nn.Module],
    rules: Mapping[str, Mapping[str, Rules]],
    *,
    matched: Iterable[str] = (),
    named: Iterable[str] = (),
) -> None:
    """Put regions around blocks and around their modules that have rules, in place.

    Args:
        found: the blocks by FQN.
        rules: rules by FQN of the block and by names of modules inside it; those of the block itself are of
            `""`, and the last of these is of every operator.
        matched: patterns of modules that a person has given, which the record has with `named`; they match.
        named: patterns of operators of which the record says whether they have matched.
    """
    ledger, modules_shown, operators_shown = HostLedger(), tuple(matched), tuple(named)
    for fqn, block in found.items():
        place = Place(
            base=rules[fqn][""],
            ledger=ledger,
            named=(*modules_shown, *operators_shown),
            fired=set(modules_shown),
        )
        modules = dict(blocks.plain_named_modules(block))
        for name, each in rules[fqn].items():
            if not name:
                continue
            region.enclose(modules[name], NamedModule(place=place, rules=each), holds_call=False)
        region.enclose(block, NamedBlock(fqn=fqn, place=place), holds_call=False)


def _gather_before_backward(units: Iterable[FSDPModule], results: Any) -> None:
    """Let units of FSDP2 inside a block have their weights when its backward begins, in one order.

    Backward gathers those of a unit when a gradient comes to what the unit gave. Operators may run again
    before that, and they run without the module, whose hooks gather in a recomputation of modules. Which ones
    do may depend on the data of a rank, so all units are gathered.
    The gradient of another result may come when units have had their backward: it gathers nothing.
    """
    gathered: list[Callable[[], None]] = []

    def give_back() -> None:
        gathered.pop()()

    def begin(_gradient: Tensor) -> None:
        if not gathered:
            gathered.append(gather(units))
            Variable._execution_engine.queue_callback(give_back)  # noqa: SLF001 (no public way)

    for result in tensors_in(results):
        if result.requires_grad:
            result.register_hook(begin)


class _ResultsOf(AbstractSet[Address]):
    """All results of some operators.

    Attributes:
        operators: their numbers.
    """

    def __init__(self) -> None:
        self.operators: set[int] = set()

    def __contains__(self, address: object) -> bool:
        return isinstance(address, tuple) and address[0] in self.operators

    def __iter__(self) -> Iterator[Address]:
        return ((number, 0) for number in self.operators)

    def __len__(self) -> int:
        return len(self.operators)


class NamedTape(BlockTape):
    """Notes the operators of a block's forward whose values do not all stay as they are.

    What other operators make is from outside for it, as the block's inputs are.

    Args:
        block: the region of the block.
    """

    def __init__(self, block: NamedBlock) -> None:
        self._moved = _ResultsOf()
        self._inside: dict[int, NamedModule | None] = {}  # where values may stay that are read elsewhere
        fates = Fates(BlockPlan(fqn=block.fqn), {}, self._moved, self._moved, self._moved, {})
        super().__init__(fates, block.place.ledger, block, is_exact=False)
        self._place = block.place

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and note it where its values do not stay as they are."""
        facts = facts_of(func)
        fate = self._place.fate_of(facts.name)
        if fate is Fate.KEEP and not self._writes_known(facts, args, kwargs):
            return func(*args, **kwargs)
        if fate is Fate.OFFLOAD:
            self._moved.operators.add(self._count)
        elif fate is Fate.RECOMPUTE:
            self._inside[self._count] = self._place.decider()
        return super().note(func, args, kwargs)

    def pack(self, saved: Tensor) -> Packed:
        """Return what the graph holds for `saved`."""
        dense = dense_of(saved)
        home = None if dense is None else self._homes.get(key_of(dense))
        if dense is not None and home is not None:
            self._show(home, saved, dense)
        return super().pack(saved)

    def _home(self, tensor: Tensor, dense: Tensor) -> StorageHome:
        home = super()._home(tensor, dense)
        self._show(home, tensor, dense)
        return home

    def _show(self, home: StorageHome, tensor: Tensor, dense: Tensor) -> None:
        """Let a value stay that is made again inside its module only, once it is read or saved elsewhere.

        What has been saved of it inside is made again from then on, too: that content has its maker.
        """
        if home.address is None or home.address[0] not in self._inside:
            return
        if self._place.decider() is self._inside[home.address[0]]:
            return
        home.address, home.latest, home.tensors = None, Content(None, dense), [tensor]

    def _writes_known(self, facts: OperatorFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Say whether an operator writes to a storage that the tape has met."""
        if not facts.writes:
            return False
        written: Iterable[Tensor] = tensors_in(list(facts.written(args, kwargs)))
        return any((storage_of(each) or 0) in self._homes for each in written)
