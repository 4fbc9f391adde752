"""Chunked forwards: programs with chunk loops that replace a module's forward, one for each kind of input.

The module's class is replaced by a dynamic subclass, as regions of activation checkpointing do; parameters,
hooks and names stay. Such a region, and FSDP2, may be put around the module afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from strategies.chunk.flow.chunk_rules import is_random
from strategies.chunk.loops.schedule import Schedule
from strategies.chunk.running.runtime import GIVEN, running_again
from strategies.chunk.running.schedule_code import ScopeCode, lower
from strategies.errors import StrategyError
from strategies.regions.blocks import Chunked, plain_class, plain_named_modules, submodule
from strategies.regions.recomputation import Recomputation
from strategies.tracing.module_state import CONSTANTS, ByIdentity
from strategies.tracing.operator_graph import ScopeGraph, autocast_dtypes, may_run_again, record
from strategies.tracing.recorder import leaves_of, value_read
from strategies.tracing.shadow import Shadow, device_of, shadowed

PROGRAMS = 64
"""Kinds of input whose programs a module keeps; beyond that the program that ran longest ago is dropped."""

_ATTRIBUTE = "_acbench_chunks"


class Scheduler(Protocol):
    """Decides what runs in which order in the forward of a scope, and whether it runs again in backward."""

    @property
    def recomputes(self) -> bool:
        """Whether only the inputs of forward are saved."""

    @property
    def kind(self) -> Hashable:
        """Equal for schedulers under which scopes of one class run the same programs."""

    def schedule(self, graph: fx.Graph, donated: frozenset[int]) -> Schedule:
        """Return the schedule of a graph of the scope, whose inputs at `donated` may be overwritten."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkProgram:
    """The code of a forward for one kind of input."""

    graph: ScopeGraph
    code: ScopeCode
    reads: Mapping[tuple[str, str], object]

    def fits(self, module: nn.Module) -> bool:
        """Whether what forward read of modules is still what it was."""
        return all(value_read(module, *place) == value for place, value in self.reads.items())

    def taken_over(self, module: nn.Module) -> ChunkProgram | None:
        """Return the program for another module, if that reads the same."""
        reads: dict[tuple[str, str], object] = {}
        for place, value in self.reads.items():
            reads[place] = value_read(module, *place)
            if not _is_alike(value, reads[place]):  # what was read next may not be there
                return None
        return replace(self, reads=reads)

    def __call__(self, module: nn.Module, tensors: Sequence[Tensor]) -> Any:
        """Return what forward returns for the tensors among its inputs."""
        read = partial(_read, module, self.graph.constants)
        called = (submodule(module, fqn) for fqn in self.code.calls)
        results = self.code.module(*map(read, self.code.reads), *called, *tensors)
        leaves = leaves_of(self.graph.outputs, results)
        return tree_unflatten(leaves, self.graph.structure)


@dataclass(kw_only=True, slots=True)
class ChunkedForward:
    """The callable that replaces one module's forward.

    Fields:
        scheduler: decides the schedule of the module's graphs.
        scopes: FQNs, relative to the module, of inner modules with a chunked forward.
        opaque: FQNs, relative to the module, of inner modules that run as they are, with the reason.
        alike: programs that scopes of one class and schedule share, by kind of input.
        recorded: programs of scopes of the same class under any scheduler.
        programs: programs of this scope, by kind of input.
        plan: plan of the whole model as JSON values; only on the model itself.
        latest: program that ran last.
    """

    scheduler: Scheduler
    scopes: frozenset[str]
    opaque: Mapping[str, str] = field(default_factory=dict)
    alike: dict[Hashable, ChunkProgram] = field(default_factory=dict)
    recorded: dict[Hashable, ChunkProgram] = field(default_factory=dict)
    programs: dict[Hashable, ChunkProgram] = field(default_factory=dict)
    plan: dict[str, Any] | None = None
    latest: ChunkProgram | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the module's own forward returns.

        Raises:
            StrategyError: the forward cannot be recorded for inputs of this kind.
        """
        given: frozenset[int] = module.__dict__.pop(GIVEN, frozenset())
        leaves, structure = tree_flatten((args, kwargs))
        kind = (structure, tuple(map(_kind, leaves)), given, _context(module))
        program = self.programs.get(kind)
        if program is None or not program.fits(module):
            program = self.alike[kind].taken_over(module) if kind in self.alike else None
        if program is None:
            # what follows is no part of the step that somebody may measure or recompute
            with _as_outside_of_inference(), _disable_current_modes(), saved_tensors_hooks(_same, _same):
                known = self.recorded[kind].taken_over(module) if kind in self.recorded else None
                if known is None or known.graph.constants:  # they are of another shadow
                    program = self._program(module, args, kwargs, given)
                else:
                    program = replace(known, code=self._code(known.graph, given))
            _keep(self.alike, kind, program)
            _keep(self.recorded, kind, program)
        _keep(self.programs, kind, program)
        self.latest = program
        device = device_of(leaves).type
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not torch.is_autocast_enabled(device):
            return self._run(program, module, tensors)
        with torch.autocast(device, enabled=False):  # the program has its casts
            return self._run(program, module, tensors)

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave programs out of copies and files: they are recorded again."""
        return _without_programs, (self.scheduler, self.scopes, self.opaque, self.plan)

    def chunks(self) -> int:
        """Return the bodies that ran in the latest forward."""
        return 0 if self.latest is None else sum(loop.chunks for loop in self.latest.code.loops)

    def _run(self, program: ChunkProgram, module: nn.Module, tensors: list[Tensor]) -> Any:
        graph = program.graph.graph
        if not (self.scheduler.recomputes and torch.is_grad_enabled() and may_run_again(graph)):
            return program(module, tensors)
        region = Recomputation(
            preserve_rng_state=any(map(is_random, graph.nodes)),
            early_stop=True,
            use_reentrant=False,
        )
        return region(module, _Again(program, module), tuple(tensors), {})

    def _program(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: frozenset[int]
    ) -> ChunkProgram:
        device = device_of(tree_flatten((args, kwargs))[0])
        _refuse_parametrized(module)

        def cast() -> tuple[Shadow, tuple[Any, ...], Mapping[str, Any]]:
            shadow = Shadow.of(module).on(device)
            assert shadow.mode is not None
            with shadow.mode:
                given = tree_map_only(Tensor, _of_a_function, shadowed(shadow, (args, kwargs), device))
            return shadow, *given

        graph = record(cast, self.scopes, self.opaque).graphs[-1]
        return ChunkProgram(
            graph=graph,
            code=self._code(graph, given),
            reads={place: value_read(module, *place) for place in graph.reads},
        )

    def _code(self, graph: ScopeGraph, given: frozenset[int]) -> ScopeCode:
        return lower(self.scheduler.schedule(graph.graph, given))


def _without_programs(
    scheduler: Scheduler, scopes: frozenset[str], opaque: Mapping[str, str], plan: dict[str, Any] | None
) -> ChunkedForward:
    return ChunkedForward(scheduler=scheduler, scopes=scopes, opaque=opaque, plan=plan)


def _refuse_parametrized(module: nn.Module) -> None:
    """Refuse parametrizations that were registered on top of a plan, of the module that it runs."""
    for each in module.modules():
        plain = plain_class(each)
        given = getattr(each, "parametrizations", ()) if isinstance(each, Chunked) else ()
        found = next((name for name in given if not hasattr(plain, name)), None)
        if found is not None:
            where = f"{found!r} of {plain.__name__!r}"
            raise StrategyError(
                "chunk", f"{where} is parametrized after the plan; parametrize first, then plan"
            )


@contextmanager
def _as_outside_of_inference() -> Iterator[None]:
    """Record as under `no_grad` what runs in inference mode, where composite operators stay whole."""
    has_gradients = torch.is_grad_enabled()
    with torch.inference_mode(mode=False), torch.set_grad_enabled(has_gradients):
        yield


def _is_alike(value: object, other: object) -> bool:
    """Whether two reads are equal, submodules by their class: what is read of them is compared for itself."""
    if value == other:
        return True
    if isinstance(value, tuple) and isinstance(other, tuple):
        return len(value) == len(other) and all(map(_is_alike, value, other))
    if not (isinstance(value, ByIdentity) and isinstance(other, ByIdentity)):
        return False
    modules = value.value, other.value
    return all(isinstance(each, nn.Module) for each in modules) and (
        plain_class(modules[0]) is plain_class(modules[1])
    )


def _keep(programs: dict[Hashable, ChunkProgram], kind: Hashable, program: ChunkProgram) -> None:
    programs.pop(kind, None)
    programs[kind] = program  # the latest comes last
    if len(programs) > PROGRAMS:
        del programs[next(iter(programs))]


class _Again:
    """A program that runs in forward, and then for what autograd has saved of it."""

    def __init__(self, program: ChunkProgram, module: nn.Module) -> None:
        self._program = program
        self._module = module
        self._has_run = False

    def __call__(self, *tensors: Tensor) -> Any:
        if self._has_run:
            with running_again():
                return self._program(self._module, tensors)
        self._has_run = True
        return self._program(self._module, tensors)


def _of_a_function(tensor: Tensor) -> Tensor:
    """Return an input that forward may write to: autograd refuses that for leaves."""
    is_dense = torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
    return tensor.clone() if tensor.requires_grad and tensor.is_leaf and is_dense else tensor


def _same(tensor: Tensor) -> Tensor:
    return tensor


def scopes_of(model: nn.Module) -> frozenset[str]:
    """Return the FQNs of the blocks of `model`: what its outermost lists of modules hold."""
    found: set[str] = set()
    for fqn, module in model.named_modules():
        is_inside = any(fqn == block or fqn.startswith(f"{block}.") for block in found)
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and not is_inside:
            blocks = {name: child for name, child in module.named_children() if any(child.children())}
            found.update(f"{fqn}.{name}".lstrip(".") for name in blocks)
    return frozenset(found)


def install(
    model: nn.Module,
    schedulers: Mapping[str, Scheduler],
    opaque: Mapping[str, str],
    recorded: dict[type[nn.Module], dict[Hashable, ChunkProgram]] | None = None,
) -> None:
    """Let the scopes of a plain `model` run as their schedulers say, in place.

    Args:
        model: a model without FSDP and without regions.
        schedulers: schedulers by FQN of the scope.
        opaque: FQNs of modules that run as they are, with the reason.
        recorded: programs of scopes of the same classes under other schedulers; their graphs are used again.
    """
    recorded = {} if recorded is None else recorded
    inner = frozenset(fqn for fqn in schedulers if fqn)
    alike: dict[Hashable, dict[Hashable, ChunkProgram]] = {}
    for fqn, scheduler in schedulers.items():
        module = model.get_submodule(fqn)
        module.__dict__[_ATTRIBUTE] = ChunkedForward(
            scheduler=scheduler,
            scopes=frozenset() if fqn else inner,
            opaque=_below(fqn, opaque),
            alike=alike.setdefault((plain_class(module), scheduler.kind), {}),
            recorded=recorded.setdefault(plain_class(module), {}),
        )
        module.__class__ = _chunked_class(type(module))  # type: ignore[arg-type]


def _below(fqn: str, named: Mapping[str, str]) -> dict[str, str]:
    """Return what is named below a module, by FQN relative to it."""
    prefix = f"{fqn}." if fqn else ""
    return {name.removeprefix(prefix): each for name, each in named.items() if name.startswith(prefix)}


def chunked_forwards(model: nn.Module) -> dict[str, ChunkedForward]:
    """Return what runs in place of forwards in `model`, by plain FQN."""
    return {
        name: vars(module)[_ATTRIBUTE]
        for name, module in plain_named_modules(model)
        if isinstance(module, Chunked) and _ATTRIBUTE in vars(module)
    }


class _RunsInChunks(Chunked):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward: ChunkedForward = vars(self)[_ATTRIBUTE]
        return _not_compiled(forward)(self, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self).__bases__[-1],), dict(vars(self))


def _not_compiled(forward: ChunkedForward) -> Callable[..., Any]:
    """Return what torch.compile calls as it is: a program is a graph already, and its recording none."""
    dynamo = sys.modules.get("torch._dynamo")  # nobody compiles who has not imported it
    return forward if dynamo is None else dynamo.disable(forward)


@cache  # one class per class
def _chunked_class(original: type[Any]) -> type[nn.Module]:
    return type(original.__name__, (_RunsInChunks, original), {"__module__": original.__module__})


def _rebuild(original: Any) -> nn.Module:
    chunked = _chunked_class(original)
    return chunked.__new__(chunked)


def _read(module: nn.Module, constants: Mapping[str, Tensor], name: str) -> Tensor:
    if name in constants:
        return constants[name]
    owner, _, attribute = name.rpartition(".")
    found: Tensor = getattr(submodule(module, owner), attribute)
    return found


def _kind(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    if isinstance(leaf, CONSTANTS):
        return type(leaf), leaf
    raise StrategyError("chunk", f"forward is called with a {type(leaf).__name__}, which no graph can hold")


def _context(module: nn.Module) -> Hashable:
    """Return what decides, beside its inputs, what a forward does."""
    return (
        torch.is_grad_enabled(),
        tuple(each.training for each in module.modules()),
        tuple(autocast_dtypes().items()),
    )
