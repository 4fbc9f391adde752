"""Tapes: what one forward did inside a region, and tickets for what autograd saved there.

A tape is a list of calls: torch functions between modules, and calls of modules. Tensors made inside stand on
it as slots; of the tensors from outside the region keeps those that its calls read. Each tensor that autograd
would save in the region is a ticket. The first ticket that backward redeems has the region's calls run again,
which fills the others.

A region inside a region keeps nothing after forward. Whatever its calls read is there again while the region
around them runs; it keeps that until its own tickets are redeemed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol, TypeAlias

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError

from strategies.errors import StrategyError
from strategies.nested.inputs import reading_of
from strategies.nested.nested_regions import Path, path_name
from strategies.nested.structures import put_together, tensors_of
from strategies.nested.surroundings import GeneratorStates, Modes, generator_states, set_generators
from strategies.regions.rewind import RewoundCall
from strategies.regions.saved_tensors import Packed, kept

Regions: TypeAlias = tuple[Path, ...]
"""The recomputed regions around a call, outermost first, by their paths."""


class Slot:
    """Stands for a tensor on a tape."""

    __slots__ = ("position",)

    def __init__(self, position: int) -> None:
        self.position = position  # how many calls the tape had when it was made; -1 outside of the region


@dataclass(kw_only=True, slots=True, eq=False)
class Call:
    """A call of a function or module on a tape.

    Fields:
        name: FQN of the module, or the name of the function.
        run: what is called.
        leaves: leaves of the arguments; tensors are slots.
        structure: structure of the arguments.
        modes: modes of torch around it.
        is_module: a module is called, with its hooks.
        rewound: the state that a module finds.
        generators: states of random number generators, where somebody has set them since the call before.
        follow: what follows the forward of a module that holds labels, when the call runs again.
        label: path where it stands.
        regions: the recomputed regions around it.
        made: slots of the tensors that it returned.
        tickets: for each tensor that autograd saved in it, as long as autograd keeps them.
        module: module whose parameters stay what they are; `None` for a function, or under FSDP.
        weights: identities of these.
        differentiates: a backward runs inside of it.
        changes_outside: it changes in place what was made outside of the region.
    """

    name: str
    run: Callable[..., Any]
    leaves: list[Any]
    structure: Any
    modes: Modes
    is_module: bool = False
    rewound: RewoundCall | None = None
    generators: GeneratorStates | None = None
    follow: Callable[[Recomputation, Call], Following] | None = None
    label: Path = ()
    regions: Regions = ()
    made: list[Slot] = field(default_factory=list)
    tickets: list[weakref.ref[Ticket]] = field(default_factory=list)
    module: nn.Module | None = None
    weights: tuple[int, ...] = ()
    differentiates: bool = False
    changes_outside: bool = False


class Ticket:
    """What the autograd graph holds for a saved tensor.

    Attributes:
        region: outermost region in which it is recomputed; `None` for a tensor that `packed` returns.
        regions: all recomputed regions around it.
    """

    __slots__ = ("__weakref__", "_kind", "_tensor", "_version", "packed", "region", "regions")

    def __init__(self, saved: Tensor, packed: Packed) -> None:
        self.packed: Packed | None = packed
        self.region: Region | None = None
        self.regions: Regions = ()
        self._tensor: Packed | None = None
        self._kind = saved.shape, saved.dtype
        self._version = saved._version if _is_parameter(saved) else None  # noqa: SLF001 (as autograd checks it)

    def belong(self, region: Region, regions: Regions) -> None:
        """Let the tensor go; it is recomputed in `regions`."""
        self.region, self.regions, self.packed = region, regions, None

    def lacks(self) -> bool:
        """Say whether it waits for a recomputation."""
        return self.region is not None and self._tensor is None

    def fill(self, tensor: Tensor, name: str) -> None:
        """Take what the recomputation has saved in the place of the tensor.

        Raises:
            CheckpointError: it is of another shape or dtype.
            RuntimeError: it is a parameter that was changed since.
        """
        if self._kind != (tensor.shape, tensor.dtype):
            then, now = (
                f"{str(dtype).removeprefix('torch.')} {list(shape)}"
                for shape, dtype in (self._kind, (tensor.shape, tensor.dtype))
            )
            raise CheckpointError(f"ac: {name!r} saved {then} in forward and {now} in its recomputation")
        if self._version is not None and tensor._version != self._version:  # noqa: SLF001
            problem = f"a parameter of {list(self._kind[0])} was changed in place after {name!r} had used it"
            raise RuntimeError(f"ac: {problem}, and before its backward; update it after backward")
        self._tensor = kept(tensor.detach())

    def unpack(self) -> Tensor:
        """Return the saved tensor.

        Raises:
            CheckpointError: the recomputation did not save it.
        """
        if self.packed is not None:
            return self.packed()
        if self._tensor is None:
            assert self.region is not None
            self.region.recompute(self.regions)
        filled, self._tensor = self._tensor, None
        if filled is None:
            name = path_name(self.regions[-1])
            raise CheckpointError(f"ac: the recomputation of region {name} saved fewer tensors than forward")
        return filled()


@dataclass(kw_only=True, slots=True, eq=False)
class Region:
    """A region of which a tape is held.

    Fields:
        regions: it and the regions around it.
        early_stop: end a recomputation when the last needed tensor is there.
        generators: states of random number generators when it began; empty if they are not to be put back.
        calls: its calls, in order.
        inputs: what its calls read from outside, as functions; `None` once it has run again.
        children: regions inside of which a tape is held too.
        is_kept: its inputs stay until the graph is freed.
        so_far: what returns its calls while its forward runs.
        running: the call of its forward that has not returned.
    """

    regions: Regions
    early_stop: bool
    generators: GeneratorStates
    calls: list[Call] = field(default_factory=list)
    inputs: dict[Slot, Callable[[], Tensor]] | None = field(default_factory=dict)
    children: dict[Regions, Region] = field(default_factory=dict)
    is_kept: bool = False
    so_far: Callable[[], list[Call]] | None = None
    running: Call | None = None

    def recompute(self, regions: Regions) -> None:
        """Fill the tickets that lie directly in `regions`, it or one inside.

        Raises:
            CheckpointError: a call does not what it did in forward.
        """
        if self.running is not None:
            self.running.differentiates = True
        if regions == self.regions:
            Recomputation(self).run()
            return
        if self.toward(regions) is None:
            Recomputation(self).run()
        inner = self.toward(regions)
        if inner is None:
            name = path_name(regions[len(self.regions)])
            raise CheckpointError(
                f"ac: region {name} did not begin in the recomputation of the one around it"
            )
        inner.recompute(regions)

    def toward(self, regions: Regions) -> Region | None:
        """Return the innermost region here, around `regions` or these themselves, that can run again."""
        around = (inner for inner in self.children if regions[: len(inner)] == inner)
        found = (self.children[inner] for inner in sorted(around, key=len, reverse=True))
        return next((each for each in found if each.can_recompute(regions)), None)

    def can_recompute(self, regions: Regions) -> bool:
        """Say whether what `regions` need is held, here or inside."""
        return self.inputs is not None or (regions != self.regions and self.toward(regions) is not None)


class _Enough(BaseException):  # (no error; no `except Exception` of a forward shall catch it)
    """The last tensor that is needed is there."""


class Following(Protocol):
    """Follows a module's forward when it runs again, and holds the tapes of the regions that begin in it."""

    def repeating(self) -> AbstractContextManager[None]:
        """Follow what runs inside of the block."""

    def saved(self, ticket: weakref.ref[Ticket]) -> None:
        """Take note that autograd saves a tensor."""


class Recomputation:
    """One run of a region's calls."""

    def __init__(self, region: Region) -> None:
        self.region = region
        own, depth = region.regions, len(region.regions)
        self._calls = region.calls if region.so_far is None else region.so_far()
        self._calls += [] if region.running is None else [region.running]
        tickets = [
            each for call in self._calls for ticket in call.tickets if (each := ticket()) and each.lacks()
        ]
        self._missing = sum(each.regions == own for each in tickets)
        deeper = (each.regions for each in tickets if len(each.regions) > depth)
        self._waiting = {regions[: depth + 1] for regions in deeper if region.toward(regions) is None}
        self._stops = region.early_stop or region.so_far is not None
        self._call: Call | None = None
        self._boxes: list[list[Tensor]] = []
        self._expected: Iterator[weakref.ref[Ticket]] = iter(())
        self._following: Following | None = None

    def run(self) -> None:
        """Fill the region's tickets, and hold the tapes of those inside that are needed."""
        region = self.region
        if region.inputs is None:
            return  # the caller says what is missing
        values = {slot: read() for slot, read in region.inputs.items()}
        before = generator_states(region.generators)
        set_generators(region.generators)
        try:
            with saved_tensors_hooks(self._pack, _unpacked):
                self._run_all(values)
        except _Enough:
            pass
        finally:
            set_generators({device: before[device] for device in region.generators})
        if not region.is_kept:
            region.inputs = None

    def began(self, child: Region) -> None:
        """Take the tape of a region inside."""
        self.region.children[child.regions] = child
        self._waiting.discard(child.regions)
        self._stop_if_enough()

    def _run_all(self, values: dict[Slot, Tensor]) -> None:
        region, depth = self.region, len(self.region.regions)
        last = {leaf: call for call in self._calls for leaf in call.leaves if type(leaf) is Slot}
        for regions, group in groupby(self._calls, lambda call: call.regions[: depth + 1]):
            if regions == region.regions:
                for call in group:
                    self._call, self._expected = call, iter(call.tickets)
                    self._run_followed(call, values, last)
                    self._refuse_fewer(call)
                    self._stop_if_enough()
                continue
            calls = list(group)
            if regions in self._waiting:
                self.began(_inner(region, regions, calls, values))
            for call in calls:
                with saved_tensors_hooks(self._boxed if call.differentiates else _dropped, _unpacked):
                    self._run(call, values, last)

    def _run(self, call: Call, values: dict[Slot, Tensor], last: dict[Any, Call]) -> None:
        run(call, values)
        for box in self._boxes:
            box.clear()
        self._boxes.clear()
        _release(call, values, last)

    def _run_followed(self, call: Call, values: dict[Slot, Tensor], last: dict[Any, Call]) -> None:
        if call.follow is None:
            self._run(call, values, last)
            return
        self._following = call.follow(self, call)
        try:
            with self._following.repeating():
                self._run(call, values, last)
        finally:
            self._following = None

    def _boxed(self, tensor: Tensor) -> list[Tensor]:
        """Hold `tensor` until the call returns, which may differentiate what it does."""
        self._boxes.append([tensor.detach()])
        return self._boxes[-1]

    def _pack(self, tensor: Tensor) -> list[Tensor]:
        self._note(tensor)
        return self._boxed(tensor)

    def _note(self, tensor: Tensor) -> None:
        call = self._call
        assert call is not None
        found = next(self._expected, None)
        if found is None:
            if not call.tickets:
                return  # its tensors were saved by others, such as hooks of the user's
            raise CheckpointError(
                f"ac: {call.name!r} saved more tensors in its recomputation than in forward"
            )
        if self._following is not None:
            self._following.saved(found)
        ticket = found()
        if ticket is not None and ticket.regions == self.region.regions and ticket.lacks():
            ticket.fill(tensor, call.name)
            self._missing -= 1
            self._stop_if_enough()

    def _refuse_fewer(self, call: Call) -> None:
        if next(self._expected, None) is not None:
            raise CheckpointError(
                f"ac: {call.name!r} saved fewer tensors in its recomputation than in forward"
            )

    def _stop_if_enough(self) -> None:
        if self._stops and not self._missing and not self._waiting:
            raise _Enough


def run(call: Call, values: dict[Slot, Tensor]) -> None:
    """Run `call` on the `values` that its slots have, and put there what it makes.

    Raises:
        CheckpointError: it returns another number of tensors.
    """
    leaves = [values[leaf] if type(leaf) is Slot else leaf for leaf in call.leaves]
    args, kwargs = put_together(call.structure, leaves)
    if call.module is not None and call.weights != tuple(map(id, call.module.parameters())):
        problem = f"{call.name!r} ran with other parameters in forward than it has now"
        raise StrategyError(
            "ac", f"{problem}; call it in a module that gives it these (torch.func.functional_call)"
        )
    if call.generators is not None:
        set_generators(call.generators)
    with call.modes.entered():
        if call.rewound is None:
            results = tensors_of(call.run(*args, **kwargs))
        else:
            with call.rewound.recomputation():
                results = tensors_of(call.run(*args, **kwargs))
    if len(results) != len(call.made):
        problem = f"returned {len(results)} tensors in its recomputation, and {len(call.made)} in forward"
        raise CheckpointError(f"ac: {call.name!r} {problem}")
    values.update(zip(call.made, results, strict=True))


def read_from_outside(calls: Iterable[Call]) -> set[Slot]:
    """Return the slots that `calls` read and do not make."""
    made: set[Slot] = set()
    read: set[Slot] = set()
    for call in calls:
        read.update(leaf for leaf in call.leaves if type(leaf) is Slot and leaf not in made)
        made.update(call.made)
    return read


def _inner(region: Region, regions: Regions, calls: list[Call], values: dict[Slot, Tensor]) -> Region:
    """Return a region inside, as it begins now."""
    return Region(
        regions=regions,
        early_stop=region.early_stop,
        generators=generator_states(region.generators) if region.generators else {},
        calls=calls,
        inputs={slot: reading_of(values[slot], regions[-1]) for slot in read_from_outside(calls)},
    )


def _release(call: Call, values: dict[Slot, Tensor], last: dict[Any, Call]) -> None:
    """Let go of what no later call reads."""
    for slot in (*call.made, *(leaf for leaf in call.leaves if type(leaf) is Slot)):
        if last.get(slot, call) is call:
            values.pop(slot, None)


def _dropped(_: Tensor) -> list[Tensor]:
    return []


def _unpacked(box: list[Tensor]) -> Tensor:
    if not box:
        raise RuntimeError("ac: a region was differentiated while it was recomputed")
    return box[0]


def _is_parameter(tensor: Tensor) -> bool:
    whole = tensor if tensor._base is None else tensor._base  # noqa: SLF001 (no public name)
    return type(whole) is nn.Parameter
