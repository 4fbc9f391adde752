"""Chunked forwards: programs with chunk loops that replace a module's forward, one for each kind of input.

The module's class is replaced by a dynamic subclass, as regions of activation checkpointing do; parameters,
hooks and names stay. Such a region, and FSDP2, may be put around the module afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_unflatten

from strategies.base import LossInputs, StrategyError, Tolerance
from strategies.chunk.flow.batch_flow import BatchFlow
from strategies.chunk.flow.chunk_rules import is_random
from strategies.chunk.loops.decisions import structure_of
from strategies.chunk.loops.schedule import Schedule
from strategies.chunk.running.batch_loop import BatchLoop, BatchProof, is_checked, is_watched, part_of
from strategies.chunk.running.proof import (
    Proofs,
    Subject,
    UnprovenError,
    copied_inputs,
    digest,
    first_samples,
    has_values,
    tolerance_of,
    without_hooks,
)
from strategies.chunk.running.runtime import GIVEN, Callee, running_again
from strategies.chunk.running.schedule_code import ScopeCode, lower
from strategies.estimate.patched import outside_of_function_modes
from strategies.regions.blocks import Chunked, plain_class, plain_named_modules, submodule, unwrapped
from strategies.regions.disguise import disguise, disguised
from strategies.regions.recomputation import Recomputation
from strategies.regions.rewind import noted_state, python_state_kept
from strategies.regions.saved_tensors import not_compiled
from strategies.tracing.guard import (
    Call,
    Guard,
    Programs,
    has_another_class,
    refuse_global_hooks,
    refuse_unseen,
    share_memory,
    switches,
)
from strategies.tracing.operator_graph import record
from strategies.tracing.recorder import leaves_of
from strategies.tracing.scope_graph import ScopeGraph, is_within, may_run_again, writes_to_given
from strategies.tracing.shadow import Shadow, device_of, mapped_once, shadowed

Loss: TypeAlias = "Callable[..., Tensor]"
"""A function of a model's results and of `LossInputs`."""

_ATTRIBUTE = "_acbench_chunks"


class Scheduler(Protocol):
    """Decides what runs in which order in the forward of a scope, and whether it runs again in backward."""

    @property
    def recomputes(self) -> bool:
        """True if only the inputs of forward are saved."""

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
    guard: Guard
    returns: tuple[Hashable, ...]
    tolerance: Tolerance

    @classmethod
    def of(cls, graphs: Sequence[ScopeGraph], code: ScopeCode, guard: Guard) -> ChunkProgram:
        """Return the program of the last of some graphs, which calls the others."""
        graph = graphs[-1]
        calls = graph.graph.find_nodes(op="call_module", sort=True)
        returns = tuple(node.meta["returns"] for node in calls)
        return cls(graph=graph, code=code, guard=guard, returns=returns, tolerance=tolerance_of(graphs))

    def taken_over(self, module: nn.Module, tensors: Sequence[Tensor]) -> ChunkProgram | None:
        """Return the program for another module, if that reads the same."""
        guard = self.guard.taken_over(module, tensors)
        return None if guard is None else replace(self, guard=guard)

    def __call__(self, module: nn.Module, tensors: Sequence[Tensor]) -> Any:
        """Return what forward returns for the tensors among its inputs."""
        read = partial(_read, module, self.graph.constants)
        returns = iter(self.returns)
        called = (Callee(submodule(module, fqn), fqn, returns) for fqn in self.code.calls)
        results = self.code.module(*map(read, self.code.reads), *called, *tensors)
        leaves = leaves_of(self.graph.outputs, results)
        return tree_unflatten(leaves, self.graph.structure)


@dataclass(kw_only=True, slots=True)
class ChunkedForward:
    """The callable that replaces one module's forward.

    Fields:
        scheduler: decides the schedule of the module's graphs.
        fqn: FQN of the module, for messages.
        scopes: FQNs, relative to the module, of inner modules with a chunked forward.
        opaque: FQNs, relative to the module, of inner modules that run as they are, with the reason.
        alike: programs that scopes of one class and schedule share.
        recorded: programs of scopes of the same class under any scheduler.
        loss: what the model goes on to where its last input is `LossInputs`; only on the model itself.
        plan: plan of the whole model as JSON values; only on the model itself.
        batch: loop over the batch, which stands around all others; only on the model itself.
        proofs: what is proven of programs, of all scopes of a plan.
    """

    scheduler: Scheduler
    fqn: str
    scopes: frozenset[str]
    opaque: Mapping[str, str] = field(default_factory=dict)
    alike: Programs[ChunkProgram] = field(default_factory=Programs)
    recorded: Programs[ChunkProgram] = field(default_factory=Programs)
    programs: Programs[ChunkProgram] = field(default_factory=Programs)
    loss: Loss | None = None
    plan: dict[str, Any] | None = None
    batch: BatchLoop | None = None
    proofs: Proofs = field(default_factory=Proofs)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the module's own forward returns.

        Raises:
            StrategyError: the forward cannot be recorded for inputs of this kind.
        """
        call = Call.of("chunk", args, kwargs)
        proof = self._proof(module, call)
        if proof is None:
            return self._whole(module, call)

        def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return self._whole(module, Call.of("chunk", args, kwargs))

        assert self.batch is not None
        return self.batch.run(proof, run, (args, kwargs))

    def _whole(self, module: nn.Module, call: Call) -> Any:
        """Return what the module's own forward returns, of all samples at once."""
        return self._run(self._known(module, call), module, call.tensors)

    def prove(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Prove what runs for a call, and all that it calls. Raises StrategyError: as of a call."""
        if self.batch is None:
            self._known(module, Call.of("chunk", args, kwargs))
        else:
            self(module, args, kwargs)

    def _known(self, module: nn.Module, call: Call) -> ChunkProgram:
        given: frozenset[int] = module.__dict__.pop(GIVEN, frozenset())
        refuse_global_hooks("chunk")
        if has_another_class(module):
            problem = f"{self.fqn or 'the model'!r} has another class than when its plan was applied"
            raise StrategyError(
                "chunk", f"{problem}, as parametrizations give it; change it before, then plan"
            )
        kind = (call.kind, given)
        program = self.programs.find(
            kind,
            lambda known: known if is_checked() or known.guard.fits(module, call.tensors) else None,
        ) or self.alike.find(kind, lambda known: known.taken_over(module, call.tensors))
        if program is None:
            # what follows is no part of the step that somebody may measure or recompute
            with _unobserved(), self._raising_as_forward(module, call):
                program = self._new_program(module, call, given)
            with _unobserved():
                self._prove(program, module, call, given)
            self.alike.keep(kind, program)
            self.recorded.keep(kind, program)
        self.programs.keep(kind, program)
        return program

    def chunks(self) -> int:
        """Return the bodies that ran in the latest forward."""
        latest = self.programs.latest
        of_batch = 0 if self.batch is None else self.batch.chunks
        return of_batch + (0 if latest is None else sum(loop.chunks for loop in latest.code.loops))

    def _proof(self, module: nn.Module, call: Call) -> BatchProof | None:
        """Return the proof that a call may run in parts of its batch, `None` where it runs as a whole."""
        if self.batch is None or torch.is_grad_enabled():
            return None
        self.batch.chunks = 0
        if any(is_watched(unwrapped(submodule(module, fqn))) for fqn in self.scopes):
            return None
        return self.batch.proof(module, call, partial(self._proven, module, call))

    def _proven(self, module: nn.Module, call: Call) -> BatchProof:
        with _unobserved():
            graphs = self._graphs(module, call)
            flow, reads = BatchFlow.of(graphs), graphs[-1].reads
            parts = [] if flow is None else self._parts(module, call, flow)
            is_kept = flow is not None and all(
                part is not None and flow.is_kept_by(graphs, part, length) for length, part in parts
            )
            reads += tuple(read for _, part in parts if part is not None for read in part[-1].reads)
            guard = Guard.of(module, call.tensors, dict.fromkeys(reads))
        return BatchProof(guard=guard, flow=flow if is_kept else None, graph=graphs[-1])

    def _parts(
        self, module: nn.Module, call: Call, flow: BatchFlow
    ) -> list[tuple[int, list[ScopeGraph] | None]]:
        """Return samples and graphs of the chunks of a call, none where forward does not run on so few."""
        assert self.batch is not None
        found: list[tuple[int, list[ScopeGraph] | None]] = []
        for length in sorted(self.batch.lengths(flow.size)):
            try:
                args, kwargs = part_of(flow, (call.args, call.kwargs), 0, length)
                found.append((length, self._graphs(module, replace(call, args=args, kwargs=kwargs))))
            except StrategyError:
                found.append((length, None))
        return found

    def _new_program(self, module: nn.Module, call: Call, given: frozenset[int]) -> ChunkProgram:
        known = self.recorded.find((call.kind, given), lambda known: known.taken_over(module, call.tensors))
        if known is None or known.graph.constants:  # they are of another shadow
            return self._program(module, call, given)
        return replace(known, code=self._code(known.graph, given))

    @contextmanager
    def _raising_as_forward(self, module: nn.Module, call: Call) -> Iterator[None]:
        """Raise with the values of the call what forward raises where it cannot be recorded.

        So it has the words that it has without a plan, and leaves random numbers and modules as it does.
        """
        try:
            yield
        except Exception as error:
            is_refusal = isinstance(error, StrategyError) and error.__cause__ is None
            if not is_refusal and has_values(module, call.tensors):
                put_back = noted_state(module)
                copied, named, _ = copied_inputs(call.args, call.kwargs)
                with without_hooks(module, but=module):
                    self._plain(module, *copied, **named)
                put_back()
            raise

    def _prove(self, program: ChunkProgram, module: nn.Module, call: Call, given: frozenset[int]) -> None:
        """Prove a program with the values of a call, unless one like it is proven, or there are none."""
        if not has_values(module, call.tensors):
            return
        places = {id(each): at for at, each in enumerate(call.tensors)}
        kinds = [
            (each.dtype, each.requires_grad, places[id(each)]) if isinstance(each, Tensor) else repr(each)
            for each in tree_leaves((call.args, call.kwargs))
        ]
        key = digest(
            (plain_class(module).__module__, plain_class(module).__qualname__, not self.fqn),
            (structure_of(program.graph.graph), repr(kinds), repr(switches()), sorted(given)),
            (self.scheduler.recomputes, repr(self.scheduler.kind), self.loss is not None),
            tuple(program.guard.reads.items()),
        )
        if key not in self.proofs.known:
            self._prove_with_samples(module, call, given)
        if key in self.proofs.known:
            return

        def run_program(*args: Any, **kwargs: Any) -> Any:
            tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            return self._run(program, module, tuple(tensors))

        Subject(
            module=module,
            fqn=self.fqn,
            graph=program.graph,
            plain=partial(self._plain, module),
            program=run_program,
            tolerance=program.tolerance,
            given=given,
        ).prove(call.args, call.kwargs)
        self.proofs.known.add(key)

    def _prove_with_samples(self, module: nn.Module, call: Call, given: frozenset[int]) -> None:
        inputs = call.args, call.kwargs
        part = first_samples(inputs)
        if part is inputs:
            return
        put_back = noted_state(module)
        try:
            module.__dict__[GIVEN] = given
            self._known(module, Call.of("chunk", *part))
        except UnprovenError:
            raise
        except Exception:  # noqa: BLE001 (whoever cannot run on a part runs on the whole)
            put_back()

    def _plain(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return what the module's own forward returns, which calls inner scopes as they stand."""
        forward = partial(plain_class(module).forward, module)
        if self.loss is None:
            return forward(*args, **kwargs)
        return _on_to(forward, self.loss)(*args, **kwargs)

    def _run(self, program: ChunkProgram, module: nn.Module, tensors: tuple[Tensor, ...]) -> Any:
        device = device_of(list(tensors)).type
        if not torch.is_autocast_enabled(device):
            return self._run_again(program, module, tensors)
        with torch.autocast(device, enabled=False):
            return self._run_again(program, module, tensors)

    def _run_again(self, program: ChunkProgram, module: nn.Module, tensors: tuple[Tensor, ...]) -> Any:
        """Run a program; where only a forward was planned, in a region, so that gradients recompute it."""
        graph = program.graph.graph
        if not (self.scheduler.recomputes and torch.is_grad_enabled() and may_run_again(graph)):
            return program(module, tensors)
        region = Recomputation(
            preserve_rng_state=any(map(is_random, graph.nodes)),
            early_stop=True,
            use_reentrant=False,
            asks_for_parameters=False,
        )
        return region(module, _Again(program, module, self.fqn), tensors, {})

    def _program(self, module: nn.Module, call: Call, given: frozenset[int]) -> ChunkProgram:
        """Return the program for a call of this kind: recorded, planned and guarded."""
        graphs = self._graphs(module, call)
        graph = graphs[-1]
        writes = writes_to_given(graph.graph)
        if writes and share_memory(call.tensors):
            problem = f"{self.fqn or 'the model'!r} writes to an input in place, on whose memory another lies"
            raise StrategyError("chunk", f"{problem}; give it tensors of their own")
        guard = Guard.of(module, call.tensors, graph.reads, writes_to_inputs=writes)
        return ChunkProgram.of(graphs, self._code(graph, given), guard)

    def _graphs(self, module: nn.Module, call: Call) -> list[ScopeGraph]:
        refuse_unseen_calls(module, self.fqn, self.scopes, self.opaque)
        _refuse_parametrized(module)
        device = device_of(list(call.tensors))

        def cast() -> tuple[Shadow, tuple[Any, ...], Mapping[str, Any]]:
            """Return a shadow of the module, with its own forwards, and shadows of the inputs."""
            shadow = Shadow.of(module).on(device)
            assert shadow.mode is not None
            for fqn in ("", *self.scopes):  # who patched the forward of a scope calls this one
                vars(shadow.model.get_submodule(fqn)).pop("forward", None)
            with shadow.mode:
                return shadow, *mapped_once(
                    _of_a_function, shadowed(shadow, (call.args, call.kwargs), device)
                )

        forward = None if self.loss is None else partial(with_loss, loss=self.loss)
        with python_state_kept(module, (), remedy=""):
            return record(cast, self.scopes, self.opaque, forward=forward).graphs

    def _code(self, graph: ScopeGraph, given: frozenset[int]) -> ScopeCode:
        return lower(self.scheduler.schedule(graph.graph, given))


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
def _unobserved() -> Iterator[None]:
    """Leave the modes of meters and of recomputation, and the hooks of autograd."""
    with (
        _as_outside_of_inference(),
        _disable_current_modes(),
        saved_tensors_hooks(_same, _same),
        outside_of_function_modes(),
    ):
        yield


@contextmanager
def _as_outside_of_inference() -> Iterator[None]:
    """Record as under `no_grad` what runs in inference mode, where composite operators stay whole."""
    has_gradients = torch.is_grad_enabled()
    with torch.inference_mode(mode=False), torch.set_grad_enabled(has_gradients):
        yield


class _Again:
    """A program that runs in forward, and then for what autograd has saved of it."""

    def __init__(self, program: ChunkProgram, module: nn.Module, fqn: str) -> None:
        self._program = program
        self._module = module
        self._fqn = fqn
        self._weights: tuple[int, ...] | None = None

    def __call__(self, *tensors: Tensor) -> Any:
        """Run the program; the second run is recomputation, with the parameters of the first."""
        weights = tuple(map(id, self._module.parameters()))
        if self._weights is None:
            self._weights = weights
            return self._program(self._module, tensors)
        if weights != self._weights:
            problem = f"{self._fqn or 'the model'!r} ran with other parameters in forward than it has now"
            raise StrategyError(
                "chunk", f"{problem}; run backward inside of what gives it these (torch.func.functional_call)"
            )
        with running_again():
            return self._program(self._module, tensors)


def _of_a_function(tensor: Tensor) -> Tensor:
    """Return an input that forward may write to: autograd refuses that for leaves."""
    is_dense = torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
    return tensor.clone() if tensor.requires_grad and tensor.is_leaf and is_dense else tensor


def _same(tensor: Tensor) -> Tensor:
    return tensor


def refuse_unseen_calls(scope: nn.Module, fqn: str, inner: frozenset[str], opaque: Collection[str]) -> None:
    """Refuse modules inside a scope, or inside its inner ones, whose calls do what no program would.

    Args:
        inner: FQNs, relative to `scope`, of inner scopes; programs call these.
        opaque: FQNs, relative to `scope`, of modules that run as they are, hooks inside of them included.

    Raises:
        StrategyError: one of them has hooks, or a forward of its own.
    """
    for name, module in plain_named_modules(scope):
        if name and name not in inner and not is_within(name, opaque):
            refuse_unseen("chunk", f"{fqn}.{name}".lstrip("."), module)


def scopes_of(model: nn.Module) -> frozenset[str]:
    """Return the FQNs of the blocks of `model`: what its outermost lists of modules hold."""
    found: set[str] = set()
    for fqn, module in model.named_modules():
        is_inside = any(fqn == block or fqn.startswith(f"{block}.") for block in found)
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and not is_inside:
            blocks = {name: child for name, child in module.named_children() if any(child.children())}
            found.update(f"{fqn}.{name}".lstrip(".") for name in blocks)
    return frozenset(found)


def with_loss(model: nn.Module, loss: Loss) -> Callable[..., Any]:
    """Return the forward of `model`, which goes on to `loss` where its last input is `LossInputs`."""
    return _on_to(model.forward, loss)


def _on_to(body: Callable[..., Any], loss: Loss) -> Callable[..., Any]:
    """Return a forward that goes on to `loss` where its last input is `LossInputs`."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not args or not isinstance(args[-1], LossInputs):
            return body(*args, **kwargs)
        return loss(body(*args[:-1], **kwargs), *args[-1].values)

    return forward


def install(
    model: nn.Module,
    schedulers: Mapping[str, Scheduler],
    opaque: Mapping[str, str],
    recorded: dict[type[nn.Module], Programs[ChunkProgram]] | None = None,
    *,
    loss: Loss | None = None,
    batch: BatchLoop | None = None,
    proofs: Proofs | None = None,
) -> None:
    """Let the scopes of a plain `model` run as their schedulers say, in place.

    Args:
        model: a model without FSDP and without regions.
        schedulers: schedulers by FQN of the scope.
        opaque: FQNs of modules that run as they are, with the reason.
        recorded: programs of scopes of the same classes under other schedulers; their graphs are used again.
        loss: function of the model's results and of `LossInputs`; `None`: the model ends with its results.
        batch: loop over the batch of the model; `None`: it runs on all samples at once.
        proofs: what is proven of such programs.
    """
    proofs = Proofs() if proofs is None else proofs
    recorded = {} if recorded is None else recorded
    inner = frozenset(fqn for fqn in schedulers if fqn)
    alike: dict[Hashable, Programs[ChunkProgram]] = {}
    for fqn, scheduler in schedulers.items():
        module = model.get_submodule(fqn)
        module.__dict__[_ATTRIBUTE] = ChunkedForward(
            scheduler=scheduler,
            fqn=fqn,
            scopes=frozenset() if fqn else inner,
            opaque=below(fqn, opaque),
            alike=alike.setdefault((plain_class(module), scheduler.kind), Programs()),
            recorded=recorded.setdefault(plain_class(module), Programs()),
            loss=None if fqn else loss,
            batch=None if fqn else batch,
            proofs=proofs,
        )
        disguise(module, _RunsInChunks)


def uninstall(model: nn.Module) -> None:
    """Undo `install`."""
    for module in model.modules():
        if isinstance(module, Chunked):
            module.__class__ = type(module).__bases__[-1]
            module.__dict__.pop(_ATTRIBUTE, None)
            module.__dict__.pop(GIVEN, None)


def prove(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Prove the programs that run for a call of a chunked `model`; nobody's hooks see it.

    Raises:
        StrategyError: as of the call.
    """
    forward: ChunkedForward = vars(model)[_ATTRIBUTE]
    forward.prove(model, args, dict(kwargs))


def below(fqn: str, named: Mapping[str, str]) -> dict[str, str]:
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
        return not_compiled(forward)(self, args, kwargs)  # a program is a graph already

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self).__bases__[-1],), dict(vars(self))


def _rebuild(original: Any) -> nn.Module:
    chunked = disguised(_RunsInChunks, original)
    return chunked.__new__(chunked)


def _read(module: nn.Module, constants: Mapping[str, Tensor], name: str) -> Tensor:
    if name in constants:
        return constants[name]
    owner, _, attribute = name.rpartition(".")
    found: Tensor = getattr(submodule(module, owner), attribute)
    return found
