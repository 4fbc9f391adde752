"""The regions that are open where a forward stands, and what belongs to which of them.

Which region a function between two calls belongs to is known when the next call begins: to those that hold
both calls. Until then it waits, and so do the tensors that autograd saves of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from strategies.base import StrategyError
from strategies.generators import of_devices
from strategies.nested.folding import Edge, folded
from strategies.nested.inputs import Owners, Reading, line_of_user, reading_of
from strategies.nested.labels import plain_modules
from strategies.nested.nest_options import Nest, Regions
from strategies.nested.nested_regions import Path, common, path_name
from strategies.nested.offloads import Offloads
from strategies.nested.repetition import Region
from strategies.nested.tape import Call, Slot, read_from_outside
from strategies.nested.tickets import Ticket
from strategies.regions.saved_tensors import Hooks, Packed, kept, packed_by


@dataclass(kw_only=True, slots=True, eq=False)
class _Open:
    """A region that has begun. `start`: number of calls on the tape when it began."""

    region: Region
    path: Path
    start: int


class OpenRegions:
    """The regions that one forward has open.

    Args:
        outer: regions around the forward, which are being recomputed.
        closed: takes the outermost region that has ended, and its tape.

    Attributes:
        model: the plain model, for messages.
        latest: path of the latest call, or of the module that runs.
        is_settled: what happens now belongs to the regions of `latest`.
        tape: calls and edges since the outermost region began.
        around: hooks around the forward, for what no region takes.
    """

    def __init__(
        self,
        nest: Nest,
        model: nn.Module,
        devices: Collection[torch.device],
        *,
        outer: Regions,
        label: Path,
        closed: Callable[[Region, Sequence[Call | Edge]], None],
    ) -> None:
        self.latest = label
        self._closed = closed
        self.is_settled = True
        self.tape: list[Call | Edge] = []
        self.around: Hooks | None = None
        self._nest = nest
        self.model = model
        self._devices = devices
        self._outer = outer
        self._settled = 0  # of the tape
        self._waiting: list[Ticket] = []
        self._open: list[_Open] = []
        self._recomputed: Regions | None = None  # where the innermost region is: what is saved is of it
        self._owners = Owners(partial(plain_modules, model))
        device_type = next((each.type for each in devices if each.type != "cpu"), "cpu")
        self.offloads = Offloads(
            {} if outer else nest.offload, () if outer else nest.kept, nest.ledger, device_type
        )

    # -- what happens in them -----------------------------------------------------------------------------

    def is_open(self) -> bool:
        """Say whether what happens now may be of a region."""
        return bool(self._open) or self.offloads.is_open

    def is_taped(self) -> bool:
        """Say whether what happens now may be recomputed."""
        return bool(self._open)

    def run(self, call: Call | None) -> None:
        """Know that `call` runs, and may differentiate what it does; `None` where it has returned."""
        if call is not None and self.is_settled:
            self._place_call(call, self.latest)
        for each in self._open:
            each.region.running = call

    def read(self, slot: Slot, tensor: Tensor, name: str, *, is_written: bool) -> None:
        """Take note that a call of `name` reads `tensor`; with `is_written` it writes it, unread."""
        self.offloads.read(tensor)
        for each in self._open:
            inputs = each.region.inputs
            assert inputs is not None
            if slot.position < each.start and slot not in inputs:
                inputs[slot] = self._input(tensor, each.path, name, is_written)

    def copy(self, slot: Slot, tensor: Tensor) -> bool:
        """Keep a copy of an input as it is now; say whether the outermost region has one."""
        inputs = self._open[0].region.inputs if self._open else None
        reading = None if inputs is None else inputs.get(slot)
        if inputs is None or not isinstance(reading, Reading):
            return False
        if not reading.is_written:
            own = kept(tensor.detach().clone())
            inputs[slot] = replace(reading, packed=own, is_written=True)
        return True

    def add(self, call: Call, results: Sequence[Tensor]) -> None:
        """Put a call that has returned on the tape."""
        self.offloads.made(results)
        if self._open:
            self.tape.append(call)
        if self.is_settled:
            self._place_calls(self.latest)

    def add_edge(self, edge: Edge) -> None:
        """Put the begin or the end of a call on the tape."""
        if self._open:
            self.tape.append(edge)

    def saved(self, tensor: Tensor, call: Call | None) -> Packed:
        """Return what autograd keeps in the place of a tensor that it saves in `call`."""
        if call is None and self._open:
            return packed_by(self.around, tensor)
        is_settled = self.is_settled and call is not None
        ticket = Ticket(tensor, holds=self._nest.split_backward == "hold")
        if call is not None:
            call.tickets.append(weakref.ref(ticket))
        if is_settled and self._recomputed is not None:
            ticket.belong(self._open[0].region, self._recomputed)
            return ticket.redeem
        ticket.packed = kept(tensor)
        if is_settled:
            self._place(ticket, tensor, self.latest)
        else:
            self._waiting.append(ticket)
        return ticket.redeem

    # -- where they begin and end -------------------------------------------------------------------------

    def settle(self, path: Path) -> None:
        """Come to a call or an end at `path`: what lies between belongs to the regions of both.

        Raises:
            StrategyError: that changes in place what was made outside of them.
        """
        between = common(self.latest, path)
        for ticket in self._waiting:
            assert ticket.packed is not None
            self._place(ticket, ticket.packed(), between)
        self._waiting.clear()
        if self._open:
            if self._nest.recomputed(between)[: len(self._outer) + 1] == self._open[0].region.regions:
                self._place_calls(between)
            while self._open and self._open[-1].path != between[: len(self._open[-1].path)]:
                self._close(self._open.pop())
            if not self._open:
                self.tape, self._settled = [], 0
        self.latest, self.is_settled = path, True
        self.offloads.enter(path)
        for end in range(1, len(path) + 1):
            self._begin(path[:end])
        self._recomputed = self._nest.recomputed(path) if path and path not in self._nest.kept else None

    def _begin(self, path: Path) -> None:
        """Open the region of a path, and note the random numbers that its recomputation must draw again."""
        if path in self._nest.kept or any(each.path == path for each in self._open):
            return
        regions = self._nest.recomputed(path)
        is_outermost = not self._open and len(regions) > len(self._outer)
        if not is_outermost and not (self._open and self.offloads.moves_inputs_of(path)):
            return
        is_kept = not self._outer  # until backward, where meters see its states
        sources = of_devices(self._devices) if self._nest.preserve_rng_state else []
        region = Region(
            regions=regions,
            early_stop=self._nest.early_stop,
            generators=[each.now(is_seen=is_kept) for each in sources],
            is_kept=is_kept,
        )
        start = len(self.tape)
        region.so_far = lambda: [each for each in self.tape[start : self._settled] if isinstance(each, Call)]
        self._open.append(_Open(region=region, path=path, start=start))

    def _close(self, ended: _Open) -> None:
        region = ended.region
        region.so_far = None
        tape = self.tape[ended.start : self._settled]
        region.calls = folded(tape, self.model)
        assert region.inputs is not None
        read = read_from_outside(region.calls)
        region.inputs = {slot: reading for slot, reading in region.inputs.items() if slot in read}
        if self._open:
            self._open[0].region.children[region.regions] = region
        else:
            self._closed(region, tape)

    def _input(self, tensor: Tensor, path: Path, name: str, is_written: bool) -> Callable[[], Tensor]:
        """Return what gives an input of a region back.

        That is its owner, the region around it, or what offloading keeps.
        """
        owned = self._owners.of(tensor)
        if owned is not None:
            return owned
        if self._outer:
            return reading_of(tensor, path)
        packed = self.offloads.of_input(tensor, path) or packed_by(self.around, tensor)
        return Reading(packed, tensor.requires_grad, path, tensor.shape, (name, line_of_user()), is_written)

    # -- what belongs to them -----------------------------------------------------------------------------

    def _place_calls(self, label: Path) -> None:
        for each in self.tape[self._settled :]:
            if isinstance(each, Call) and each.changes_outside:
                region = path_name(self._open[0].path) if self._open else path_name(self.latest)
                problem = f"region {region} changes in place what was made outside of it, by {each.name!r}"
                raise StrategyError("ac", f"{problem}, so it cannot be recomputed; leave it outside")
            self._place_call(each, label)
        self._settled = len(self.tape)

    def _place_call(self, call: Call | Edge, label: Path) -> None:
        call.label, call.regions = label, self._nest.recomputed(label)

    def _place(self, ticket: Ticket, tensor: Tensor, label: Path) -> None:
        """Decide what becomes of a tensor that autograd saves: the innermost region is asked first."""
        for end in range(len(label), 0, -1):
            if label[:end] not in self._nest.kept:
                ticket.belong(self._open[0].region, self._nest.recomputed(label[:end]))
                return
            moved = self.offloads.of_saved(tensor, label[:end])
            if moved is not None:
                ticket.packed = moved
                return
        ticket.packed = packed_by(self.around, tensor)
