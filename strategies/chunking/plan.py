"""Chunk plans: what runs in chunks in a model so that its activations stay within a budget of bytes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten

from strategies.blocks import Chunked, plain_class, unwrapped
from strategies.chunking.decisions import Decisions, Structure, decisions_of, structure_of, take_again
from strategies.chunking.forward import ChunkedForward, chunked_forwards, put
from strategies.chunking.loops import Loop, Schedule
from strategies.chunking.search import Search, unchunked
from strategies.chunking.training_plan import TrainingPlanner, train_once
from strategies.errors import StrategyError
from strategies.fx.program import device_of, shadowed
from strategies.fx.shadow import Shadow
from strategies.plan.cost import Machine, machine_for
from strategies.plan.liveness import Storages
from strategies.plan.meter import LiveBytes
from strategies.plan.record import ScopeGraph, record_scopes


class InfeasibleBudget(StrategyError):
    """No plan that was found keeps the budget.

    Args:
        where: the configuration path of the budget.
        budget_bytes: what was asked for.
        minimum_feasible_bytes: the smallest peak of activations that a plan reaches.
    """

    def __init__(self, where: str, budget_bytes: int, minimum_feasible_bytes: int) -> None:
        super().__init__(
            where,
            f"no plan keeps activations within {budget_bytes} bytes; "
            f"the smallest reachable peak is {minimum_feasible_bytes} bytes",
        )
        self.budget_bytes = budget_bytes
        self.minimum_feasible_bytes = minimum_feasible_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStep:
    """What a training pass holds beside the model.

    Fields:
        loss: takes the model's results and `loss_inputs`, its bytes are counted; `None` for the sum of the
            results' elements. It is not chunked; a loss inside the model is.
        loss_inputs: what `loss` takes behind the results.
        reserved_bytes: held by others at any moment, and counted as activations.
    """

    loss: Callable[..., Tensor] | None = None
    loss_inputs: tuple[Any, ...] = ()
    reserved_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRegion:
    """Operators that run as one loop.

    Fields:
        scope: FQN of the module in whose forward they stand; `""` is the model.
        operators: names in the listing of the scope, in order.
        dimension: of the value that the region grew from, along which it is cut; `None` for a sum.
        of: the name of that value.
        size: of the chunk axis.
        chunk_size: positions in a chunk; the last one may have less.
        chunks: how often the operators run.
    """

    scope: str
    operators: tuple[str, ...]
    dimension: int | None
    of: str
    size: int
    chunk_size: int
    chunks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ScopeScheduler:
    """Decides for the forward of one scope, on all shapes of its inputs.

    Fields:
        decisions: what was decided, by structure of the graph.
        goal_bytes: the peak to keep in graphs of another structure.
        machine: whose time is saved.
    """

    decisions: Mapping[Structure, Decisions]
    goal_bytes: int
    machine: Machine

    def schedule(self, graph: fx.Graph, donated: frozenset[int]) -> Schedule:
        """Return the schedule of a graph of the scope, whose inputs at `donated` may be overwritten."""
        plain = unchunked(graph, Storages.of_graph(graph), {})
        inputs = _inputs_at(graph, donated)
        known = self.decisions.get(structure_of(graph))
        again = None if known is None else take_again(known, graph, plain, inputs)
        return again or Search(plain, self.machine, inputs).fit(self.goal_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkPlan:
    """Which parts of a model's forward run in chunks, and the bytes that follow.

    Fields:
        budget_bytes: what was asked for; `None` for the smallest.
        predicted_peak_bytes: the highest total of storages made by a pass of the planned model.
        unchunked_peak_bytes: the same of the model as it is.
        minimum_feasible_bytes: the smallest peak that this search has seen; it has not looked below a budget that
            the model keeps as it is.
        predicted_slowdown: time with the plan / time without, by the cost model.
        training: whether the pass has a backward.
        regions: in the order of scopes and of operators.
        schedulers: by FQN of the scope.
    """

    budget_bytes: int | None
    predicted_peak_bytes: int
    unchunked_peak_bytes: int
    minimum_feasible_bytes: int
    predicted_slowdown: float
    training: bool
    regions: tuple[PlannedRegion, ...]
    schedulers: Mapping[str, ScopeScheduler] = field(repr=False)

    @classmethod
    def make(
        cls,
        model: nn.Module,
        sample: tuple[Any, ...],
        budget_bytes: int | None = None,
        *,
        fraction: float | None = None,
        training: bool = False,
        step: PlannedStep | None = None,
        where: str = "chunk.budget",
    ) -> ChunkPlan:
        """Return the fastest plan that was found whose peak is at most `budget_bytes`.

        Args:
            model: plain; on the meta device is enough. Its training flags are those of the planned pass.
            sample: positional inputs; meta tensors are enough.
            budget_bytes: of activations, at least 1; `None` for the smallest peak.
            fraction: of the peak of the model as it is, in place of `budget_bytes`.
            training: whether to plan forward and backward.
            step: what else the pass holds.
            where: the configuration path that messages name.

        Raises:
            InfeasibleBudget: no plan that was found keeps the budget.
            StrategyError: the budget is no positive number, the model is chunked already, or its forward
                depends on data.
        """
        if budget_bytes is not None and (type(budget_bytes) is not int or budget_bytes < 1):
            raise StrategyError(where, f"must be a whole number of bytes, at least 1, got {budget_bytes!r}")
        plain = unwrapped(model)
        _refuse_chunked(plain)
        device = device_of(tree_flatten(sample)[0])
        shadow = Shadow.of(plain).on(device)
        inputs, _ = shadowed(shadow, (sample, {}), device)
        scopes = scopes_of(plain)
        with torch.set_grad_enabled(training):
            graphs = record_scopes(shadow, scopes, inputs, {}, where=where)
        rehearsal = _Rehearsal(plain, sample, device, step or PlannedStep(), training=training)
        unchunked_bytes = rehearsal.peak_bytes({})
        if fraction is not None:
            budget_bytes = int(unchunked_bytes * fraction)
        if budget_bytes is not None and budget_bytes >= unchunked_bytes:
            return cls._nothing(budget_bytes, unchunked_bytes, training=training)
        planner = _Planner(graphs, machine_for(device))
        make = _training_plan if training else _forward_plan
        chosen, minimum = make(planner, rehearsal, budget_bytes)
        if budget_bytes is not None and chosen.peak_bytes > budget_bytes:
            raise InfeasibleBudget(where, budget_bytes, minimum)
        return cls(
            budget_bytes=budget_bytes,
            predicted_peak_bytes=chosen.peak_bytes,
            unchunked_peak_bytes=unchunked_bytes,
            minimum_feasible_bytes=minimum,
            predicted_slowdown=chosen.slowdown,
            training=training,
            regions=tuple(chosen.regions()),
            schedulers=chosen.schedulers(planner.machine),
        )

    @classmethod
    def _nothing(cls, budget_bytes: int, unchunked_bytes: int, *, training: bool) -> ChunkPlan:
        """Return the plan of a model that fits as it is."""
        return cls(
            budget_bytes=budget_bytes,
            predicted_peak_bytes=unchunked_bytes,
            unchunked_peak_bytes=unchunked_bytes,
            minimum_feasible_bytes=unchunked_bytes,
            predicted_slowdown=1.0,
            training=training,
            regions=(),
            schedulers={},
        )

    def apply(self, model: nn.Module) -> nn.Module:
        """Return `model`, whose scopes run the plan from now on, in place.

        Names of parameters and buffers, and hooks of the model and its blocks, stay as they are.

        Raises:
            StrategyError: the model is chunked already, or a module inside a scope has hooks.
        """
        plain = unwrapped(model)
        _refuse_chunked(plain)
        inner = frozenset(fqn for fqn in self.schedulers if fqn)
        for fqn in self.schedulers:
            _refuse_hooks(fqn, plain.get_submodule(fqn), frozenset() if fqn else inner)
        _put(plain, self.schedulers)
        for forward in chunked_forwards(plain).values():
            forward.plan = self.to_dict() if forward.scopes or len(self.schedulers) == 1 else None
        return model

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values, what runs it left out."""
        names = ("budget_bytes", "predicted_peak_bytes", "unchunked_peak_bytes", "minimum_feasible_bytes")
        numbers = {name: getattr(self, name) for name in names}
        regions = [asdict(region) | {"operators": list(region.operators)} for region in self.regions]
        return {**numbers, "predicted_slowdown": self.predicted_slowdown, "regions": regions}


def _put(model: nn.Module, schedulers: Mapping[str, ScopeScheduler]) -> None:
    inner = frozenset(fqn for fqn in schedulers if fqn)
    for fqn, scheduler in schedulers.items():
        forward = ChunkedForward(scheduler=scheduler, scopes=frozenset() if fqn else inner)
        put(model.get_submodule(fqn), forward)


@dataclass(frozen=True, slots=True)
class _Rehearsal:
    """One pass of a model on tensors without memory."""

    model: nn.Module
    sample: tuple[Any, ...]
    device: torch.device
    step: PlannedStep
    training: bool = field(kw_only=True)

    def peak_bytes(self, schedulers: Mapping[str, ScopeScheduler]) -> int:
        """Return the highest total of the storages that the pass makes, gradients of parameters left out."""
        shadow = Shadow.of(self.model).on(self.device)
        assert shadow.mode is not None
        inputs, targets = shadowed(shadow, (self.sample, self.step.loss_inputs), self.device)
        standing = [*shadow.model.parameters(), *shadow.model.buffers()]
        standing += [leaf for leaf in tree_flatten((inputs, targets))[0] if isinstance(leaf, Tensor)]
        _put(shadow.model, schedulers)
        with torch.set_grad_enabled(self.training), shadow.mode, LiveBytes(standing) as meter:
            if self.training:
                gradients = train_once(shadow.model, inputs, self.step.loss, targets)
                return meter.peak_bytes(gradients) + self.step.reserved_bytes
            returned = shadow.model(*inputs)
            peak = meter.peak_bytes()
            del returned
            return peak


def _forward_plan(planner: _Planner, rehearsal: _Rehearsal, budget: int | None) -> tuple[_Planned, int]:  # noqa: ARG001 (both makers have one signature)
    smallest = planner.plan(0)
    if budget is None:
        return smallest, smallest.peak_bytes
    fitting = planner.plan(budget)
    chosen = min((smallest, fitting), key=lambda each: (each.peak_bytes > budget, each.slowdown))
    return chosen, min(smallest.peak_bytes, fitting.peak_bytes)


def _training_plan(planner: _Planner, rehearsal: _Rehearsal, budget: int | None) -> tuple[_Planned, int]:
    """Return the fastest choice that a rehearsal finds within the budget, and the smallest peak of a rehearsal."""
    training = planner.training()
    path = training.path()
    known: dict[int, _Planned] = {}

    def rehearsed(index: int) -> _Planned:
        if index not in known:
            schedules = training.schedules(path[index])
            planned = _Planned(
                graphs=planner.graphs,
                schedules=schedules,
                goals=[path[index].peak_bytes] * len(schedules),
                peak_bytes=0,
                slowdown=path[index].seconds / path[0].seconds,
            )
            peak = rehearsal.peak_bytes(planned.schedulers(planner.machine))
            known[index] = replace(planned, peak_bytes=peak)
        return known[index]

    smallest = min(
        (rehearsed(index) for index in range(max(len(path) - 3, 0), len(path))),
        key=lambda each: each.peak_bytes,
    )
    if budget is None or smallest.peak_bytes > budget:
        return smallest, smallest.peak_bytes
    low, high = 0, len(path) - 1  # peaks fall along the path, nearly
    while low < high:
        middle = (low + high) // 2
        if rehearsed(middle).peak_bytes <= budget:
            high = middle
        else:
            low = middle + 1
    fitting = [each for each in known.values() if each.peak_bytes <= budget]
    return min(fitting, key=lambda each: each.slowdown), smallest.peak_bytes


def scopes_of(model: nn.Module) -> frozenset[str]:
    """Return the FQNs of the blocks of `model`: what its outermost lists of modules hold."""
    found: set[str] = set()
    for fqn, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and not any(
            fqn == block or fqn.startswith(f"{block}.") for block in found
        ):
            found.update(
                f"{fqn}.{name}".lstrip(".")
                for name, child in module.named_children()
                if any(child.children())
            )
    return frozenset(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Planned:
    """The schedules of all scopes.

    Fields:
        graphs: inner ones first, the model's last.
        schedules: of these.
        goals: the peaks that were asked of them.
        peak_bytes: of the whole pass.
        slowdown: time of the pass / time without loops.
    """

    graphs: list[ScopeGraph]
    schedules: list[Schedule]
    goals: list[int]
    peak_bytes: int
    slowdown: float

    def regions(self) -> list[PlannedRegion]:
        return [
            _planned(graph.fqn, item)
            for graph, schedule in zip(self.graphs, self.schedules, strict=True)
            for item in schedule.items
            if isinstance(item, Loop)
        ]

    def schedulers(self, machine: Machine) -> dict[str, ScopeScheduler]:
        found: dict[str, ScopeScheduler] = {}
        for graph, schedule, goal in zip(self.graphs, self.schedules, self.goals, strict=True):
            # identical blocks share one schedule, whose nodes are those of the first one's graph
            decided = decisions_of(next(iter(schedule.storages.of)).graph, schedule)
            earlier = found[graph.fqn].decisions if graph.fqn in found else {}
            found[graph.fqn] = ScopeScheduler(
                decisions={structure_of(graph.graph): decided, **earlier}, goal_bytes=goal, machine=machine
            )
        return found


class _Planner:
    """Plans the scopes of one model; identical scopes once."""

    def __init__(self, graphs: list[ScopeGraph], machine: Machine) -> None:
        self.machine = machine
        self.graphs = graphs
        self._root = graphs[-1].graph
        self._calls = [node for node in self._root.nodes if node.op == "call_module"]
        self._plain: dict[Hashable, Schedule] = {}
        self._fitted: dict[Hashable, Schedule] = {}
        self._signatures = [_signature(graph.graph) for graph in graphs]
        for graph, signature in zip(graphs, self._signatures, strict=True):
            if signature not in self._plain:
                self._plain[signature] = unchunked(graph.graph, Storages.of_graph(graph.graph), {})
        self._seconds = sum(self._plain[each].seconds(machine) for each in self._signatures)

    def plan(self, goal: int) -> _Planned:
        """Return the schedules whose peak is at most `goal`, or near the smallest."""
        root = self._plain[self._signatures[-1]]
        donated = root.donations()
        for _ in range(2):  # loops of the root may let other inputs of calls live longer
            schedules, goals, calls = [], [], {}
            before = dict(zip(root.items, root.profile().before_bytes, strict=True))
            for call, signature in zip(self._calls, self._signatures[:-1], strict=True):
                goals.append(max(goal - before[call], 0))
                schedules.append(self._fit(signature, donated[call], goals[-1]))
                calls[call] = schedules[-1].profile().peak_bytes - sum(root.storages.made[call].values())
            plain = replace(self._plain[self._signatures[-1]], calls=calls)
            root = Search(plain, self.machine).fit(goal)
            if root.donations() == donated:
                break
            donated = root.donations()
        schedules.append(root)
        return _Planned(
            graphs=self.graphs,
            schedules=schedules,
            goals=[*goals, goal],
            peak_bytes=root.profile().peak_bytes,
            slowdown=sum(schedule.seconds(self.machine) for schedule in schedules) / self._seconds,
        )

    def training(self) -> TrainingPlanner:
        """Return the planner of forward and backward."""
        return TrainingPlanner(self.graphs, self._plain, self._signatures, self.machine, 0)

    def _fit(self, signature: Hashable, donated: frozenset[int], goal: int) -> Schedule:
        key = signature, donated, goal
        if key not in self._fitted:
            plain = self._plain[signature]
            graph = next(iter(plain.storages.of)).graph
            self._fitted[key] = Search(plain, self.machine, _inputs_at(graph, donated)).fit(goal)
        return self._fitted[key]


def _signature(graph: fx.Graph) -> Hashable:
    """Return what graphs have in common that one schedule suits."""
    return tuple(
        (
            node.op,
            node.name,
            str(node.target),
            repr(node.args),
            repr(node.kwargs),
            _shapes(node.meta.get("val")),
        )
        for node in graph.nodes
    )


def _shapes(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    return tuple(map(_shapes, value)) if isinstance(value, tuple | list) else None


def _inputs_at(graph: fx.Graph, positions: frozenset[int]) -> frozenset[fx.Node]:
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return frozenset(inputs[position] for position in positions)


def _planned(scope: str, loop: Loop) -> PlannedRegion:
    seed = loop.region.seed
    return PlannedRegion(
        scope=scope,
        operators=tuple(node.name for node in loop.region.members),
        dimension=None if seed.axis is None else seed.axis.dim,
        of=seed.node.name,
        size=loop.size,
        chunk_size=loop.length,
        chunks=loop.chunks,
    )


def _refuse_chunked(model: nn.Module) -> None:
    if any(isinstance(module, Chunked) for module in model.modules()):
        raise StrategyError(
            "chunk", f"{plain_class(model).__name__!r} is chunked already; plan a plain model"
        )


def _refuse_hooks(fqn: str, scope: nn.Module, inner: frozenset[str]) -> None:
    """Refuse hooks of modules inside a scope: its program does not call them."""
    for name, module in scope.named_modules():
        inside = any(name == block or name.startswith(f"{block}.") for block in inner)
        hooks = (
            module._forward_hooks,  # noqa: SLF001
            module._forward_pre_hooks,  # noqa: SLF001
            module._backward_hooks,  # noqa: SLF001
            module._backward_pre_hooks,  # noqa: SLF001
        )
        if name and not inside and any(hooks):
            where = f"{fqn}.{name}".lstrip(".")
            raise StrategyError(
                "chunk", f"{where!r} has hooks, which a chunked forward does not call; remove them"
            )
