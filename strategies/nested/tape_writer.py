"""The writer of tapes: follows one forward, and notes its calls for the regions that are open."""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter

from strategies.base import StrategyError
from strategies.last_words import refuses_hooks
from strategies.nested.folding import UNITS, Edge
from strategies.nested.inputs import line_of_error
from strategies.nested.labels import Target
from strategies.nested.listening import Listener, running_backward
from strategies.nested.nest_options import Nest, Regions
from strategies.nested.nested_regions import Path, refuse_gap
from strategies.nested.noted_tensors import NotedTensors, version
from strategies.nested.open_regions import OpenRegions
from strategies.nested.repetition import Region, Repetition
from strategies.nested.structures import taken_apart, tensors_of
from strategies.nested.surroundings import DrawnNumbers, Modes
from strategies.nested.tape import Call, Slot
from strategies.nested.tickets import Ticket
from strategies.regions.own_parameters import identities_of, of_other_parameters, weights_of
from strategies.regions.rewind import RewoundCall, all_modules
from strategies.regions.saved_tensors import Hooks, Packed, hooks_around, packed_by, packing

_RANDOM = re.compile(
    "rand|drop|bernoulli|multinomial|normal|rrelu|attention|uniform|exponential|poisson|geometric|cauchy"
)
_CHANGES = re.compile("[^_]_$|^__setitem__$|^__i[a-z]+__$")  # its first argument, in place
_WRITES_STATISTICS = ("batch_norm", "instance_norm")


class TapeWriter(Listener):
    """Follows one forward.

    Args:
        model: the plain model, for messages.
        outer: regions around the forward, which are being recomputed.
        floor: path of calls without a label.
        counts: calls before, by FQN.

    Attributes:
        calls: FQN and path of every call of a module that is not looked into; `None` joins what is around.
    """

    def __init__(
        self,
        nest: Nest,
        model: nn.Module,
        devices: Collection[torch.device],
        *,
        outer: Regions = (),
        label: Path = (),
        floor: Path | None = None,
        counts: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(nest.labels.targets(model).values())
        self.calls: list[tuple[str, Path | None]] = []
        self._nest = nest
        self._model = model
        self._devices = devices
        self._floor = floor
        self._counts = Counter(counts or {})
        self._last_seen: dict[Path, int] = {}
        self._latest_path: Path = ()
        self._running: Call | None = None
        self._modes: Modes | None = None
        self._hooks: Hooks | None = None
        self._tensors = NotedTensors()
        self._drawn = DrawnNumbers(devices if nest.preserve_rng_state else None)
        self._regions = OpenRegions(nest, model, devices, outer=outer, label=label, closed=self._closed)
        self._is_sharded = any(isinstance(module, UNITS) for module in all_modules(model))

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow the forward that runs inside of the block.

        Raises:
            StrategyError: the regions do not fit what it does.
        """
        self._regions.around = hooks_around()
        with self.listening(), packing(self._pack), _refusing_transforms():
            self._hooks = hooks_around()
            try:
                yield
            finally:
                self._hooks = None  # which hold this writer
            with self.aside():
                self._regions.settle(())

    def check_calls(self, *, is_whole: bool) -> None:
        """Refuse labels that do not fit the calls of the forward that has ended.

        Args:
            is_whole: every labelled module should have been called; otherwise one of them.

        Raises:
            StrategyError: a labelled module has no calls, or its names are not as many as its calls.
        """
        labelled = [target for target in self._targets if target.paths]
        called = [target for target in labelled if self._counts[target.fqn]]
        if len(called) < len(labelled) and not self._nest.labels.is_partial and (is_whole or not called):
            missing = next(target.fqn for target in labelled if target not in called)
            problem = f"{missing!r} is a submodule that forward does not call"
            raise StrategyError(self._nest.labels.where, problem)
        for target in called:
            paths, count = target.paths, self._counts[target.fqn]
            if len(set(paths)) > 1 and len(paths) != count:
                problem = f"{target.fqn!r} has {len(paths)} names with different labels, and {count} calls"
                raise StrategyError(self._nest.labels.where, f"{problem}; give all its names one label")

    # -- calls --------------------------------------------------------------------------------------------

    def _function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function between modules, and note it on the tape while a region is open."""
        if not self._regions.is_open():
            return func(*args, **kwargs)
        name = _name(func)
        self._regions.is_settled = False
        leaves: list[Any] = []
        structure = taken_apart((args, kwargs), leaves)
        if any(isinstance(leaf, np.ndarray) for leaf in leaves):
            return func(*args, **kwargs)  # somebody may write it; the result is kept as it is
        call, before = self._begun(name, func, leaves, structure)
        if _CHANGES.search(name) and args and isinstance(args[0], Tensor):
            self._copy(args[0])
        is_random = _RANDOM.search(name) is not None
        if is_random:
            call.generators = self._drawn.set_in_between()
        self._running = call
        try:
            result = func(*args, **kwargs)
        finally:
            self._running = None
        self._end(call, before, result)
        if is_random:
            self._note_drawn()
        return result

    def _call(self, target: Target, body: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a module: look into it where it is a scope, else note it as one call of its label's region."""
        label = target.path(self._counts[target.fqn])
        self._counts[target.fqn] += 1
        if target.is_scope:
            return self._scope(target, label, body, args, kwargs)
        path = self._floor if label is None else label
        self._list(target.fqn, path)
        if path is None:
            self._regions.is_settled = False
        else:
            self._regions.settle(path)
        if self._regions.is_open():
            return self._module(target, body, args, kwargs)
        with self._without_hooks():
            return body(*args, **kwargs)

    def _module(self, target: Target, body: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        call, before = self._begin_module(target, body, args, kwargs)
        weights = weights_of(target.module)
        if self._is_sharded and not all(map(_is_own, weights)):
            raise of_other_parameters(repr(target.fqn))
        versions = [version(weight) for weight in weights]
        call.module = None if self._is_sharded else target.module
        call.weights = identities_of(weights)
        if self._regions.is_taped() and not self._is_sharded:
            call.found = self._nest.outside.found_by(target.module, (), target.fqn)
        self._running = call
        self._regions.run(call)
        try:
            with self._regions.offloads.calling(target.module):
                result = body(*args, **kwargs)
        finally:
            self._running = None
            self._regions.run(None)
        if call.rewound is not None:
            call.rewound.end()
        if call.found is not None:
            call.found.end()
        call.changes_outside = versions != [version(weight) for weight in weights]
        self._end(call, before, result)
        self._note_drawn()
        return result

    def _scope(
        self, target: Target, label: Path | None, body: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Return the result of a module's call whose forward is followed too."""
        floor = self._floor if label is None else label
        if label is not None:
            self._regions.settle(label)
        call = None
        if self._regions.is_open():
            counts = self._counts.copy()
            call, _ = self._begin_module(target, body, args, kwargs)
            call.follow = partial(_Session, self._nest, self._model, self._devices, floor, counts)
            self._regions.add_edge(Edge(fqn=target.fqn, is_begin=True, call=call))
        outer, self._floor = self._floor, floor
        try:
            with self.heard():
                result = body(*args, **kwargs)
        finally:
            self._floor = outer
        if call is not None:
            if call.rewound is not None:
                call.rewound.end()
            call.made = self._slots(result)
        self._regions.add_edge(Edge(fqn=target.fqn, is_begin=False, call=call))
        if label is not None:
            self._regions.settle(label)
        return result

    def _begin_module(
        self, target: Target, body: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[Call, list[tuple[Tensor, int]]]:
        """Begin the entry of a module's call, with the state that it finds."""
        rewound = self._rewound(target.module)
        leaves: list[Any] = []
        structure = taken_apart((args, kwargs), leaves)
        call, before = self._begun(target.fqn, body, leaves, structure)
        call.is_module, call.rewound = True, rewound
        call.generators = self._drawn.set_in_between()
        return call, before

    def _rewound(self, module: nn.Module) -> RewoundCall | None:
        if not self._nest.rewind or not self._regions.is_taped():
            return None
        rewound = self._nest.rewinds.call(module)
        rewound.begin()
        return rewound

    # -- what a call reads and makes ----------------------------------------------------------------------

    def _begun(
        self, name: str, run: Callable[..., Any], leaves: list[Any], structure: Any
    ) -> tuple[Call, list[tuple[Tensor, int]]]:
        before = []
        is_written = name in _WRITES_STATISTICS
        for at, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                before.append((leaf, version(leaf)))
                slot = leaves[at] = self._tensors.read(leaf)
                self._regions.read(slot, leaf, name, is_written=is_written)
        modes = Modes.now()
        if self._modes is None or modes != self._modes:
            self._modes = modes
        return Call(name=name, run=run, leaves=leaves, structure=structure, modes=self._modes), before

    def _copy(self, tensor: Tensor) -> None:
        """Have the region copy what it reads from outside and the next call changes: `tensor` or its base."""
        for each in (tensor, tensor._base):  # noqa: SLF001 (what it is a view of)
            slot = None if each is None else self._tensors.slot(each)
            if each is not None and slot is not None and slot.position < 0:
                if self._tensors.is_alone(each, slot) and self._regions.copy(slot, each):
                    self._tensors.admit(each)
                return

    def _end(self, call: Call, before: Sequence[tuple[Tensor, int]], result: Any) -> None:
        results = tensors_of(result)
        changed = [tensor for tensor, then in before if version(tensor) != then]
        for tensor in changed:
            call.changes_outside |= self._tensors.change(tensor)
        if not call.modes.grad and any(
            each.requires_grad and self._tensors.slot(each) is None for each in results
        ):
            return  # inside a function of autograd, which gives its results their history: they are kept
        if results or changed or call.is_module:
            call.made = self._slots(results)
            self._regions.add(call, results)

    def _slots(self, result: Any) -> list[Slot]:
        position = len(self._regions.tape)
        return [self._tensors.made(tensor, position) for tensor in tensors_of(result)]

    def _note_drawn(self) -> None:
        if self._regions.is_taped():
            self._drawn.note()

    def _closed(self, region: Region, tape: Sequence[Call | Edge]) -> None:  # noqa: ARG002 (others take them)
        """Forget all that was of the outermost region that has ended: its tickets hold it."""
        self._tensors.forget()
        self._drawn.forget()

    # -- what autograd saves ------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Packed:
        """Return what autograd keeps of a saved tensor: a ticket in regions, the tensor itself elsewhere."""
        was_quiet, self._is_quiet = self._is_quiet, True
        try:  # a function of autograd may be running, and this code is none of it
            if not self._regions.is_open() or self._task != running_backward():
                return packed_by(self._regions.around, tensor)
            return self._regions.saved(tensor, self._running)
        finally:
            self._is_quiet = was_quiet

    @contextmanager
    def _without_hooks(self) -> Iterator[None]:
        """Have autograd save as it does elsewhere, in a module of no region."""
        autograd = torch._C._autograd  # noqa: SLF001 (nothing public takes hooks away)
        hooks = hooks_around()
        if hooks is None or hooks != self._hooks:
            yield
            return
        autograd._pop_saved_tensors_default_hooks()  # noqa: SLF001
        try:
            yield
        finally:
            autograd._push_saved_tensors_default_hooks(*hooks)  # noqa: SLF001

    # -- the order of calls -------------------------------------------------------------------------------

    def _list(self, fqn: str, path: Path | None) -> None:
        """Note a call of a module. Raises StrategyError: it stands in a region that has ended."""
        self.calls.append((fqn, path))
        if path is None:
            return
        for end in range(1, len(path) + 1):
            region = path[:end]
            if region in self._last_seen and self._latest_path[:end] != region:
                names = [name for name, _ in self.calls]
                refuse_gap(
                    region, names, self._last_seen[region] + 1, len(names) - 1, self._nest.labels.where
                )
            self._last_seen[region] = len(self.calls) - 1
        self._latest_path = path


class _Session(TapeWriter):
    """Follows a module's forward in a recomputation, where the regions inside begin again."""

    def __init__(  # noqa: PLR0917 (made in two steps)
        self,
        nest: Nest,
        model: nn.Module,
        devices: Collection[torch.device],
        floor: Path | None,
        counts: Mapping[str, int],
        repetition: Repetition,
        call: Call,
    ) -> None:
        super().__init__(
            nest, model, devices, outer=call.regions, label=call.label, floor=floor, counts=counts
        )
        self._repetition = repetition
        self._repeated = call

    def saved(self, ticket: weakref.ref[Ticket]) -> None:
        """Take note that autograd saves a tensor."""
        if self._running is not None:
            self._running.tickets.append(ticket)

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Follow the call that runs inside of the block."""
        with self.listening():
            yield
            with self.aside():
                self._regions.settle(self._repeated.label)

    def _closed(self, region: Region, tape: Sequence[Call | Edge]) -> None:
        super()._closed(region, tape)
        self._repetition.began(region)


@contextmanager
def _refusing_transforms() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not refuses_hooks(error):
            raise
        line = line_of_error(error)
        problem = (
            f"gradients of torch.func{f' ({line})' if line else ''} stand in a region, or between modules"
        )
        raise StrategyError(
            "ac", f"{problem}, where torch takes none; call them in a module outside of all regions"
        ) from error


def _is_own(weight: Tensor) -> bool:
    """Say if a sharded model's forward finds this as its parameter; FSDP1 lends views of what it gathers."""
    return isinstance(weight, nn.Parameter) or isinstance(weight._base, FlatParameter)  # noqa: SLF001 (no public name)


def _name(func: Any) -> str:
    name: str = getattr(func, "__name__", type(func).__name__)
    return str(func.__self__.__name__) if name == "__get__" else name
