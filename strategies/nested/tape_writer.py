"""The writer of tapes: follows one forward, call by call, and opens and closes the regions of its labels.

Which region a function between two calls belongs to is known when the next call begins: to those that hold
both calls. Until then it waits, and so do the tensors that autograd saves of it.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

from strategies.errors import StrategyError
from strategies.nested.inputs import Owners, Reading, line_of_user, reading_of
from strategies.nested.labels import Labels, Target, plain_modules
from strategies.nested.nested_regions import Path, common, path_name, refuse_gap
from strategies.nested.offloads import Offloads, storage_of
from strategies.nested.structures import taken_apart, tensors_of
from strategies.nested.surroundings import CPU, GeneratorStates, Modes, are_equal, generator_states
from strategies.nested.tape import (
    Call,
    Recomputation,
    Region,
    Regions,
    Slot,
    Ticket,
    read_from_outside,
)
from strategies.regions.blocks import submodule
from strategies.regions.host_copies import HostLedger
from strategies.regions.offload_kinds import OffloadKind
from strategies.regions.rewind import Rewind
from strategies.regions.saved_tensors import Packed, kept

_INTERCEPTED = "_compiled_call_impl"
"""The attribute of a module that torch calls in place of its forward and hooks, where it is set."""

_GETTERS = """shape dtype device ndim requires_grad grad grad_fn layout is_leaf is_cuda is_cpu is_meta
    is_sparse itemsize is_nested is_quantized _base _version _grad _grad_fn"""
_METHODS = """size dim numel nelement stride item tolist is_contiguous is_floating_point is_complex
    data_ptr backward register_hook retain_grad element_size ndimension storage_offset untyped_storage
    __len__ numpy"""
_NOT_NOTED = frozenset(
    [getattr(Tensor, name).__get__ for name in _GETTERS.split() if hasattr(Tensor, name)]
    + [getattr(Tensor, name) for name in _METHODS.split() if hasattr(Tensor, name)]
    + [torch.autograd.grad, torch.autograd.backward]
)
"""Functions without results to repeat: what they return is a constant, or is kept as it is."""

_RANDOM = re.compile(
    "rand|drop|bernoulli|multinomial|normal|rrelu|attention|uniform|exponential|poisson|geometric|cauchy"
)
_WRITES_STATISTICS = ("batch_norm", "instance_norm")

_Known: TypeAlias = tuple["weakref.ref[Tensor]", Slot, bool, int]
"""A tensor, its slot, and its `requires_grad` and version when a call on the tape had it last."""


class Rewinds(weakref.WeakKeyDictionary[nn.Module, Rewind]):
    """What was learned of the state of modules; a copy has learned nothing."""

    def __reduce__(self) -> tuple[type[Rewinds], tuple[()]]:
        return Rewinds, ()

    def __deepcopy__(self, memo: object) -> Rewinds:
        return Rewinds()


@dataclass(frozen=True, kw_only=True, slots=True)
class Nest:
    """What is to be done to one model.

    Fields:
        labels: labels of its submodules.
        kept: regions that are not recomputed.
        preserve_rng_state, early_stop, rewind: options of recomputation.
        offload: what of a region waits in host memory, by the region's path.
        ledger: ledger of the host copies.
        rewinds: what was learned of the state of modules.
    """

    labels: Labels
    kept: frozenset[Path] = frozenset()
    preserve_rng_state: bool = True
    early_stop: bool = True
    rewind: bool = True
    offload: Mapping[Path, OffloadKind] = field(default_factory=dict)
    ledger: HostLedger = field(default_factory=HostLedger)
    rewinds: Rewinds = field(default_factory=Rewinds)

    def recomputed(self, path: Path) -> Regions:
        """Return the recomputed regions around a call at `path`."""
        prefixes = (path[:end] for end in range(1, len(path) + 1))
        return tuple(prefix for prefix in prefixes if prefix not in self.kept)


@dataclass(kw_only=True, slots=True, eq=False)
class _Edge:
    """Where a call of a module that holds labels begins or ends on a tape.

    Fields:
        fqn: FQN of the module.
        is_begin: it begins.
        call: that call as a whole; `None` where no region was open when it began.
        label, regions: where this stands.
    """

    fqn: str
    is_begin: bool
    call: Call | None
    label: Path = ()
    regions: Regions = ()


@dataclass(kw_only=True, slots=True, eq=False)
class _Open:
    """A region that has begun.

    Fields:
        region: what is held of it.
        path: its path.
        start: number of calls on the tape when it began.
    """

    region: Region
    path: Path
    start: int


class TapeWriter(TorchFunctionMode):
    """Follows one forward.

    Args:
        nest: what is to be done.
        model: the plain model, for messages.
        devices: devices of its tensors.
        outer: regions around the forward, which are being recomputed.
        label: path where the forward stands.
        floor: path of calls without a label.
        counts: calls before, by FQN.
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
        super().__init__()
        self.calls: list[tuple[str, Path | None]] = []
        self.counts = Counter(counts or {})
        self._nest = nest
        self._model = model
        self._targets = nest.labels.targets(model).values()
        self._devices = devices
        self._outer = outer
        self._latest = label  # path of the latest call, or of the module that runs
        self._floor = floor
        self._task = running_backward()
        self._is_quiet = self._is_away = False
        self._running: Call | None = None
        self._is_settled = True
        self._modes: Modes | None = None
        self._drawn: GeneratorStates | None = None
        self._last_seen: dict[Path, int] = {}
        self._tape: list[Any] = []  # calls and edges since the outermost region began
        self._settled = 0  # of these
        self._waiting: list[tuple[Ticket, Call | None]] = []
        self._open: list[_Open] = []
        self._known: dict[int, _Known] = {}
        self._outside: set[int] = set()  # storages
        self._rewritten: set[int] = set()
        units = FSDPModule | FullyShardedDataParallel
        self._is_sharded = any(isinstance(module, units) for module in model.modules())
        device_type = next((each.type for each in devices if each.type != "cpu"), "cpu")
        self._offloads = Offloads(
            {} if outer else nest.offload, () if outer else nest.kept, nest.ledger, device_type
        )
        self._owners = Owners(partial(plain_modules, model))
        self._around: Any = None

    # -- one forward, or one call of a module in a recomputation ------------------------------------------

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow the forward that runs inside of the block.

        Raises:
            StrategyError: the regions do not fit what it does.
        """
        self._around = torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: SLF001
        with self.listening(), saved_tensors_hooks(self._pack, _unpack):
            yield
            with self._aside():
                self._settle(())

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Be told of functions, and of the calls of the targets."""
        with ExitStack() as stack:
            for target in self._targets:
                stack.callback(_intercept(target.module, partial(self._called, target)))
            stack.enter_context(self)
            yield

    # -- calls ------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._is_noting() or func in _NOT_NOTED or torch._C._are_functorch_transforms_active():  # noqa: SLF001
            return func(*args, **kwargs)
        name = _name(func)
        self._is_settled = False
        call, before = self._begin(name, func, args, kwargs)
        if call is None:
            return func(*args, **kwargs)
        is_random = _RANDOM.search(name) is not None
        if is_random:
            call.generators = self._set_in_between()
        self._running = call
        try:
            result = func(*args, **kwargs)
        finally:
            self._running = None
        self._end(call, before, tensors_of(result))
        if is_random:
            self._note_drawn()
        return result

    @property
    def _is_open(self) -> bool:
        return bool(self._open) or self._offloads.is_open

    def _is_noting(self) -> bool:
        return self._is_open and not self._is_quiet and self._task == running_backward()

    def _called(self, target: Target, body: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self._is_quiet or self._task != running_backward():
            return body(*args, **kwargs)
        label = target.path(self.counts[target.fqn])
        self.counts[target.fqn] += 1
        with self._aside():
            if target.is_scope:
                return self._scope(target, label, body, args, kwargs)
            path = self._floor if label is None else label
            self._list(target.fqn, path)
            if path is not None:
                self._settle(path)
            self._is_settled = path is not None
            if self._is_open:
                return self._module(target, body, args, kwargs)
            return body(*args, **kwargs)

    def _module(self, target: Target, body: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the result of a module's call, which is one call on the tape."""
        with self._rewinding(target.module, body) as (run, rewound):
            call, before = self._begin(target.fqn, run, args, kwargs)
            assert call is not None
            call.is_module, call.rewound = True, rewound
            call.generators = self._set_in_between()
            weights = [(weight, _version(weight)) for weight in target.module.parameters()]
            call.module = None if self._is_sharded else target.module
            call.weights = tuple(id(weight) for weight, _ in weights)
            with self._running_now(call), self._offloads.calling(target.module):
                result = run(*args, **kwargs)
            call.changes_outside = any(_version(weight) != version for weight, version in weights)
            self._end(call, before, tensors_of(result))
            self._note_drawn()
        return result

    @contextmanager
    def _running_now(self, call: Call) -> Iterator[None]:
        """Know `call` while it runs: what autograd saves is of it, and it may differentiate what it does."""
        self._running = call
        if self._is_settled:
            call.label, call.regions = self._latest, self._nest.recomputed(self._latest)
            for each in self._open:
                each.region.running = call
        try:
            yield
        finally:
            self._running = None
            for each in self._open:
                each.region.running = None

    def _scope(
        self, target: Target, label: Path | None, body: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Return the result of a module's call whose forward is followed too."""
        floor = self._floor if label is None else label
        if label is not None:
            self._settle(label)
        if not self._is_open:
            with self._followed(floor):
                result = body(*args, **kwargs)
            self._scope_ends(target.fqn, None, label)
            return result
        counts = self.counts.copy()
        with self._rewinding(target.module, body) as (run, rewound):
            call, _ = self._begin(target.fqn, run, args, kwargs)
            assert call is not None
            call.rewound = rewound
            call.follow = partial(_Session, self._nest, self._model, self._devices, floor, counts)
            call.generators = self._set_in_between()
            self._tape.append(_Edge(fqn=target.fqn, is_begin=True, call=call))
            with self._followed(floor):
                result = run(*args, **kwargs)
        call.made = [self._slot_of(tensor) for tensor in tensors_of(result)]
        self._scope_ends(target.fqn, call, label)
        return result

    def _scope_ends(self, fqn: str, call: Call | None, label: Path | None) -> None:
        if self._open:
            self._tape.append(_Edge(fqn=fqn, is_begin=False, call=call))
        if label is not None:
            self._settle(label)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Be told of nothing inside of the block: neither of what a module does nor of this code."""
        with ExitStack() as stack:
            self._is_quiet = True
            stack.callback(setattr, self, "_is_quiet", False)
            if _get_current_function_mode() is self:
                stack.enter_context(_pop_mode_temporarily())
                self._is_away = True
                stack.callback(setattr, self, "_is_away", False)
            yield

    @contextmanager
    def _followed(self, floor: Path | None) -> Iterator[None]:
        """Be told again inside of the block, where calls without a label have `floor`."""
        outer, self._floor = self._floor, floor
        is_away, self._is_away, self._is_quiet = self._is_away, False, False
        try:
            with self if is_away else nullcontext():
                yield
        finally:
            self._floor, self._is_away, self._is_quiet = outer, is_away, True

    @contextmanager
    def _rewinding(
        self, module: nn.Module, body: Callable[..., Any]
    ) -> Iterator[tuple[Callable[..., Any], Any]]:
        if not self._nest.rewind or not self._open:
            yield body, None
            return
        rewound = self._nest.rewinds.setdefault(module, Rewind()).call(module)
        with rewound.forward():
            yield rewound.body(body), rewound

    # -- what a call reads and makes ----------------------------------------------------------------------

    def _begin(
        self, name: str, run: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[Call | None, list[tuple[Tensor, int]]]:
        """Return a call, and its tensors with their versions; `None` if it cannot be noted."""
        leaves: list[Any] = []
        structure = taken_apart((args, kwargs), leaves)
        before = []
        is_written = name in _WRITES_STATISTICS
        for at, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                before.append((leaf, _version(leaf)))
                leaves[at] = self._slot_read(leaf, name, is_written)
            elif isinstance(leaf, np.ndarray) and not isinstance(run, partial):
                return None, []  # somebody may write it; the result is kept as it is
        modes = Modes.now()
        self._modes = modes if modes != self._modes else self._modes
        assert self._modes is not None
        return Call(name=name, run=run, leaves=leaves, structure=structure, modes=self._modes), before

    def _end(self, call: Call, before: Sequence[tuple[Tensor, int]], results: Sequence[Tensor]) -> None:
        """Note what a call made and changed."""
        changed = [tensor for tensor, version in before if _version(tensor) != version]
        for tensor in changed:
            self._note_change(tensor, call)
        if not call.modes.grad and any(
            each.requires_grad and self._valid_slot(each) is None for each in results
        ):
            return  # inside a function of autograd, which gives its results their history: they are kept
        if results or changed or call.is_module:
            call.made = [self._slot_of(tensor) for tensor in results]
            self._offloads.made(results)
            if self._open:
                self._tape.append(call)
            if self._is_settled:
                self._place_calls(self._latest)

    def _slot_read(self, tensor: Tensor, name: str, is_written: bool) -> Slot:
        self._offloads.read(tensor)
        slot = self._valid_slot(tensor)
        if slot is None:
            slot = Slot(-1)
            self._know(tensor, slot)
            self._outside.add(storage_of(tensor))
        for each in self._open:
            inputs = each.region.inputs
            assert inputs is not None
            if slot.position < each.start and slot not in inputs:
                inputs[slot] = self._input(tensor, each.path, name, is_written)
        return slot

    def _input(self, tensor: Tensor, path: Path, name: str, is_written: bool) -> Callable[[], Tensor]:
        owned = self._owners.of(tensor)
        if owned is not None:
            return owned
        if self._outer:
            return reading_of(tensor, path)
        line = line_of_user()
        what = f"a tensor of {list(tensor.shape)} in {name!r}{f' ({line})' if line else ''}"
        packed = self._offloads.of_input(tensor, path) or self._packed_around(tensor)
        return Reading(packed, tensor.requires_grad, path, what, is_written)

    def _slot_of(self, tensor: Tensor) -> Slot:
        """Return the slot of a result, which may be an argument."""
        slot = self._valid_slot(tensor)
        if slot is None:
            slot = Slot(len(self._tape))
            self._know(tensor, slot)
        return slot

    def _valid_slot(self, tensor: Tensor) -> Slot | None:
        """Return the slot of `tensor`; `None` where it is new, or was changed by what is not on the tape."""
        found = self._known.get(id(tensor))
        if found is None or found[0]() is not tensor or found[2] != tensor.requires_grad:
            return None
        if found[3] != _version(tensor) and storage_of(tensor) not in self._rewritten:
            return None
        return found[1]

    def _know(self, tensor: Tensor, slot: Slot) -> None:
        self._known[id(tensor)] = weakref.ref(tensor), slot, tensor.requires_grad, _version(tensor)

    def _note_change(self, tensor: Tensor, call: Call) -> None:
        storage = storage_of(tensor)
        if storage in self._outside:
            call.changes_outside = True
        self._rewritten.add(storage)
        found = self._known.get(id(tensor))
        if found is not None:
            self._know(tensor, found[1])

    def _changes_outside(self, name: str) -> StrategyError:
        region = path_name(self._open[0].path) if self._open else path_name(self._latest)
        problem = f"region {region} changes in place what was made outside of it, by {name!r}"
        return StrategyError("ac", f"{problem}, so it cannot be recomputed; leave it outside")

    def _set_in_between(self) -> GeneratorStates | None:
        """Return the states of generators that were set, or drawn from, by what is not on the tape."""
        if self._drawn is None or not self._nest.preserve_rng_state:
            return None
        now = generator_states(self._devices)
        return None if are_equal(now, self._drawn) else now

    def _note_drawn(self) -> None:
        if self._open and self._nest.preserve_rng_state:
            self._drawn = generator_states(self._devices)

    # -- what autograd saves ------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Packed:
        was_quiet, self._is_quiet = (
            self._is_quiet,
            True,
        )  # a function of autograd may be running, and this code is none of it
        try:
            return self._packed(tensor)
        finally:
            self._is_quiet = was_quiet

    def _packed(self, tensor: Tensor) -> Packed:
        call = self._running
        if not self._is_open or (self._open and call is None) or self._task != running_backward():
            return self._packed_around(tensor)
        ticket = Ticket(tensor, kept(tensor))
        if call is not None:
            call.tickets.append(weakref.ref(ticket))
        if self._is_settled and call is not None:
            self._place(ticket, tensor, self._latest)
        else:
            self._waiting.append((ticket, call))
        return ticket.unpack

    def _place(self, ticket: Ticket, tensor: Tensor, label: Path) -> None:
        """Decide what becomes of a tensor that autograd saves: the innermost region is asked first."""
        for end in range(len(label), 0, -1):
            if label[:end] not in self._nest.kept:
                ticket.belong(self._open[0].region, self._nest.recomputed(label[:end]))
                return
            moved = self._offloads.of_saved(tensor, label[:end])
            if moved is not None:
                ticket.packed = moved
                return
        ticket.packed = self._packed_around(tensor)

    def _packed_around(self, tensor: Tensor) -> Packed:
        if self._around is None:
            return kept(tensor)
        pack, unpack = self._around
        return partial(unpack, pack(tensor))

    # -- regions ------------------------------------------------------------------------------------------

    def _list(self, fqn: str, path: Path | None) -> None:
        """Note a call of a module.

        Raises:
            StrategyError: it stands in a region that has ended.
        """
        before = next((each for _, each in reversed(self.calls) if each is not None), ())
        self.calls.append((fqn, path))
        for end in range(1, len(path or ()) + 1):
            region = (path or ())[:end]
            if region in self._last_seen and before[:end] != region:
                names = [name for name, _ in self.calls]
                refuse_gap(region, names, self._last_seen[region] + 1, len(names) - 1, "ac.labels")
            self._last_seen[region] = len(self.calls) - 1

    def _settle(self, path: Path) -> None:
        """Come to a call or an end at `path`: what lies between belongs to the regions of both."""
        between = common(self._latest, path)
        for ticket, _ in self._waiting:
            assert ticket.packed is not None
            self._place(ticket, ticket.packed(), between)
        self._waiting.clear()
        if self._open:
            if self._nest.recomputed(between)[: len(self._outer) + 1] == self._open[0].region.regions:
                self._place_calls(between)
            while self._open and self._open[-1].path != between[: len(self._open[-1].path)]:
                self._close(self._open.pop())
            if not self._open:
                self._forget()
        self._latest = path
        self._offloads.enter(path)
        self._begin_regions(path)

    def _place_calls(self, label: Path) -> None:
        """Say of all calls that waited where they stand."""
        regions = self._nest.recomputed(label)
        for each in self._tape[self._settled :]:
            if isinstance(each, Call) and each.changes_outside:
                raise self._changes_outside(each.name)
            each.label, each.regions = label, regions
        self._settled = len(self._tape)

    def _begin_regions(self, path: Path) -> None:
        for end in range(1, len(path) + 1):
            prefix, regions = path[:end], self._nest.recomputed(path[:end])
            is_outermost = not self._open and len(regions) > len(self._outer)
            is_on_host = self._offloads.moves_inputs_of(prefix)
            if prefix in self._nest.kept or any(each.path == prefix for each in self._open):
                continue
            if is_outermost or (self._open and is_on_host):
                self._begin_region(prefix, regions)

    def _begin_region(self, path: Path, regions: Regions) -> None:
        generators = generator_states(self._devices) if self._nest.preserve_rng_state else {}
        if generators and not self._outer:
            generators[CPU] = torch.get_rng_state()  # one that meters of memory follow
        region = Region(
            regions=regions, early_stop=self._nest.early_stop, generators=generators, is_kept=not self._outer
        )
        start = len(self._tape)
        region.so_far = lambda: [each for each in self._tape[start : self._settled] if isinstance(each, Call)]
        self._open.append(_Open(region=region, path=path, start=start))

    def _close(self, ended: _Open) -> None:
        region = ended.region
        region.so_far = None
        region.calls = self._folded(self._tape[ended.start : self._settled])
        assert region.inputs is not None
        read = read_from_outside(region.calls)
        region.inputs = {slot: reading for slot, reading in region.inputs.items() if slot in read}
        if self._open:
            outermost = self._open[0].region
            outermost.children[region.regions] = region
        else:
            self._closed(region)

    def _closed(self, region: Region) -> None:
        """Take the outermost region that has ended: its tickets hold it."""

    def _forget(self) -> None:
        self._tape, self._settled, self._drawn = [], 0, None
        self._known, self._outside, self._rewritten = {}, set(), set()

    def _folded(self, tape: Sequence[Call | _Edge]) -> list[Call]:
        """Return calls where those inside a module are one call of it, unless a region begins or ends there.

        Raises:
            StrategyError: one does, and the module has hooks or is an FSDP unit.
        """
        tape_calls = ((at, each) for at, each in enumerate(tape) if isinstance(each, Call))
        last_read = {leaf: at for at, call in tape_calls for leaf in call.leaves if type(leaf) is Slot}
        calls: list[Call] = []
        begun: list[tuple[int, _Edge]] = []
        for at, each in enumerate(tape):
            if isinstance(each, Call):
                calls.append(each)
            elif each.is_begin:
                begun.append((len(calls), each))
            else:
                start, begin = begun.pop() if begun else (0, None)
                inside = calls[start:]
                whole = each.call if begin is not None and begin.regions == each.regions else None
                made = {slot for call in inside for slot in call.made} - set(whole.made if whole else ())
                if whole is not None and not any(
                    last_read.get(slot, -1) > at for slot in made if slot.position >= 0
                ):
                    whole.label, whole.regions = each.label, each.regions
                    whole.tickets = [ticket for call in inside for ticket in call.tickets]
                    calls[start:] = [whole]
                else:
                    self._refuse_hooks(each.fqn)
        for _, each in begun:
            self._refuse_hooks(each.fqn)
        return calls

    def _refuse_hooks(self, fqn: str) -> None:
        """Refuse to go around the call of a module that does more than its forward."""
        module = submodule(self._model, fqn)
        is_unit = isinstance(module, FSDPModule | FullyShardedDataParallel)
        kinds = "forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks"
        if is_unit or any(vars(module)[f"_{kind}"] for kind in kinds):
            what = "an FSDP unit" if is_unit else "a module with hooks"
            problem = f"a region begins inside {fqn!r}, {what}, and ends outside of it"
            raise StrategyError("ac.labels", f"{problem}, or the other way round; end it with {fqn!r}")

    def check_calls(self) -> None:
        """Refuse labels that do not fit the calls of the forward that has ended.

        Raises:
            StrategyError: a labelled module has no calls, or its names are not as many as its calls.
        """
        for target in self._targets:
            paths, count = target.paths, self.counts[target.fqn]
            if paths and not count and not self._nest.labels.is_partial:
                raise StrategyError(
                    self._nest.labels.where, f"{target.fqn!r} is a submodule that forward does not call"
                )
            if len(set(paths)) > 1 and len(paths) != count:
                problem = f"{target.fqn!r} has {len(paths)} names with different labels, and {count} calls"
                raise StrategyError(self._nest.labels.where, f"{problem}; give all its names one label")


class _Session(TapeWriter):
    """Follows a module's forward in a recomputation, where the regions inside begin again."""

    def __init__(  # noqa: PLR0917 (made in two steps)
        self,
        nest: Nest,
        model: nn.Module,
        devices: Collection[torch.device],
        floor: Path | None,
        counts: Mapping[str, int],
        recomputation: Recomputation,
        call: Call,
    ) -> None:
        super().__init__(
            nest, model, devices, outer=call.regions, label=call.label, floor=floor, counts=counts
        )
        self._recomputation = recomputation
        self._call = call

    def saved(self, ticket: weakref.ref[Ticket]) -> None:
        """Take note that autograd saves a tensor."""
        if self._running is not None:
            self._running.tickets.append(ticket)

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Follow the call that runs inside of the block."""
        with self.listening():
            yield
            with self._aside():
                self._settle(self._call.label)

    def _closed(self, region: Region) -> None:
        self._recomputation.began(region)


def _intercept(module: nn.Module, called: Callable[..., Any]) -> Callable[[], None]:
    """Have `called` run the calls of `module`, given what would run them; return what ends that."""
    attributes = vars(module)
    before = attributes.get(_INTERCEPTED)
    attributes[_INTERCEPTED] = partial(called, module._call_impl if before is None else before)  # noqa: SLF001

    def end() -> None:
        if before is None:
            del attributes[_INTERCEPTED]
        else:
            attributes[_INTERCEPTED] = before

    return end


def running_backward() -> int:
    """Return the number of the backward in which this code runs; -1 outside of all."""
    return torch._C._current_graph_task_id()  # noqa: SLF001 (nothing public tells)


def _unpack(packed: Packed) -> Tensor:
    return packed()


def _name(func: Any) -> str:
    name: str = getattr(func, "__name__", type(func).__name__)
    return str(func.__self__.__name__) if name == "__get__" else name


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version  # noqa: SLF001 (as autograd checks it)
