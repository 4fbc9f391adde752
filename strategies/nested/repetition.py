"""A region that runs its calls again, and fills the tickets of what autograd saved in them.

A region inside a region keeps nothing after forward. Whatever its calls read is there again while the region
around them runs; it keeps that until its own tickets are redeemed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from strategies.generators import State, put
from strategies.nested.inputs import ParameterReading, readings_of
from strategies.nested.listening import running_backward
from strategies.nested.nest_options import Regions
from strategies.nested.nested_regions import path_name
from strategies.nested.tape import Call, Following, Slot, read_from_outside, run
from strategies.nested.tickets import Ticket
from strategies.regions.outside_tensors import FoundTensors
from strategies.regions.saved_tensors import packing, without_graph
from strategies.regions.spoilt_values import SpoiltValues


@dataclass(kw_only=True, slots=True, eq=False)
class Region:
    """A region of which a tape is held.

    Fields:
        early_stop: end a recomputation when the last needed tensor is there.
        generators: states of random number generators when it began; empty if they are not to be put back.
        inputs: what its calls read from outside, as functions; `None` once it has run again.
        children: regions inside of which a tape is held too.
        is_kept: its inputs stay until the graph is freed.
        so_far: what returns its calls while its forward runs.
        running: the call of its forward that has not returned.
        is_unfinished: its last call had not returned when it was begun again.
        spoilt: follows what its inputs have from tensors that were written to since forward.
    """

    regions: Regions
    early_stop: bool
    generators: list[State]
    calls: list[Call] = field(default_factory=list)
    inputs: dict[Slot, Callable[[], Tensor]] | None = field(default_factory=dict)
    children: dict[Regions, Region] = field(default_factory=dict)
    is_kept: bool = False
    so_far: Callable[[], list[Call]] | None = None
    running: Call | None = None
    is_unfinished: bool = False
    spoilt: SpoiltValues | None = None

    def recompute(self, regions: Regions) -> None:
        """Fill the tickets that lie directly in `regions`, it or one inside.

        Raises:
            CheckpointError: a call does not what it did in forward.
        """
        if self.running is not None:
            self.running.differentiates = True
        if regions == self.regions:
            Repetition(self).run()
            return
        if self.toward(regions) is None:
            Repetition(self).run()
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


class Repetition:
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
        self._task = running_backward()
        self._stops = region.early_stop or region.so_far is not None or region.is_unfinished
        self._call: Call | None = None
        self._boxes: list[list[Tensor]] = []
        self._expected: Iterator[weakref.ref[Ticket]] = iter(())
        self._following: Following | None = None
        self._spoilt = region.spoilt

    def run(self) -> None:
        """Fill the region's tickets, and hold the tapes of those inside that are needed."""
        region = self.region
        if region.inputs is None:
            return  # the caller says what is missing
        values = {slot: read() for slot, read in region.inputs.items()}
        past = [*chain.from_iterable(each.past() for each in self._outside())]
        if past and self._spoilt is not None:
            self._spoilt.add(past)
        elif past:
            self._spoilt = SpoiltValues(past)
        before = _now(region.generators)
        put(region.generators)
        try:
            with self._spoilt or nullcontext(), packing(self._pack, _unpacked):
                self._run_all(values)
        except _Enough:
            pass
        finally:
            put(before)
        if not region.is_kept:
            region.inputs = None

    def began(self, child: Region) -> None:
        """Take the tape of a region inside."""
        child.spoilt = self._spoilt
        self.region.children[child.regions] = child
        self._waiting.discard(child.regions)
        self._stop_if_enough()

    def _outside(self) -> Iterator[FoundTensors | ParameterReading]:
        """Yield what forward has read from outside, without the tensors that the region holds."""
        yield from (call.found for call in self._calls if call.found is not None)
        assert self.region.inputs is not None
        yield from (each for each in self.region.inputs.values() if isinstance(each, ParameterReading))

    def _run_all(self, values: dict[Slot, Tensor]) -> None:
        """Run the calls of the region again; those of regions inside fill no tickets of this one."""
        region, depth = self.region, len(self.region.regions)
        last = {slot: call for call in self._calls for slot in call.read()}
        for regions, group in groupby(self._calls, lambda call: call.regions[: depth + 1]):
            if regions == region.regions:
                for call in group:
                    self._call, self._expected = call, iter(call.tickets)
                    self._run_followed(call, values, last)
                    if next(self._expected, None) is not None:
                        raise CheckpointError(
                            f"ac: {call.name!r} saved fewer tensors in its recomputation than in forward"
                        )
                    self._stop_if_enough()
                continue
            calls = list(group)
            if regions in self._waiting:
                self.began(_inner(region, regions, calls, values))
            for call in calls:
                with packing(self._boxed if call.differentiates else _dropped, _unpacked):
                    self._run(call, values, last)

    def _run(self, call: Call, values: dict[Slot, Tensor], last: dict[Any, Call]) -> None:
        run(call, values)
        for box in self._boxes:
            box.clear()
        self._boxes.clear()
        for slot in (*call.made, *call.read()):
            if last.get(slot, call) is call:
                values.pop(slot, None)

    def _run_followed(self, call: Call, values: dict[Slot, Tensor], last: dict[Any, Call]) -> None:
        """Run a call again, with what follows it, such as an offloading region, told of it."""
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
        saved = without_graph(tensor)
        box = [saved if self._spoilt is None else self._spoilt.given(saved)]
        self._boxes.append(box)
        return box

    def _pack(self, tensor: Tensor) -> list[Tensor]:
        box = self._boxed(tensor)
        if running_backward() == self._task:  # forward gave no tickets in a backward inside of a call
            self._note(box[0])
        return box

    def _note(self, tensor: Tensor) -> None:
        """Give a tensor that a call has saved again to the ticket that waits for it."""
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

    def _stop_if_enough(self) -> None:
        if self._stops and not self._missing and not self._waiting:
            raise _Enough


def _now(states: list[State]) -> list[State]:
    return [each.source.now() for each in states]


def _inner(region: Region, regions: Regions, calls: list[Call], values: dict[Slot, Tensor]) -> Region:
    return Region(
        regions=regions,
        early_stop=region.early_stop,
        generators=_now(region.generators),
        calls=calls,
        inputs=readings_of({slot: values[slot] for slot in read_from_outside(calls)}, regions[-1]),
        is_unfinished=region.is_unfinished or region.running in calls,
    )


def _dropped(_: Tensor) -> list[Tensor]:
    return []


def _unpacked(box: list[Tensor]) -> Tensor:
    if not box:
        raise RuntimeError("ac: a region was differentiated while it was recomputed")
    return box[0]
