"""Chunk plans: which parts of a model run in chunks, so that its activations stay within a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from strategies.base import InfeasibleBudget, PlannedStep, StrategyError
from strategies.chunk.flow.chunk_rules import is_cut
from strategies.chunk.planning.batch_schedules import BatchSchedules
from strategies.chunk.planning.plan_proof import PlanProof
from strategies.chunk.planning.rehearsal import Rehearsal
from strategies.chunk.planning.scope_schedules import ModelScopes, PlannedRegion, ScopeScheduler
from strategies.chunk.planning.training_schedules import TrainingSchedules
from strategies.chunk.running.batch_loop import BatchLoop
from strategies.chunk.running.chunked_forward import (
    Loss,
    below,
    chunked_forwards,
    install,
    refuse_unseen_calls,
)
from strategies.chunk.running.proof import Proofs
from strategies.estimate.machine import Machine
from strategies.estimate.operator_cost import bytes_of, machine_for, tensors_of
from strategies.regions.blocks import Chunked, plain_class, unwrapped
from strategies.tracing.guard import refuse_attributes
from strategies.tracing.scope_graph import ScopeGraph

_MUCH = 4  # times the results of an operator are the smallest peak, where it is named


@dataclass(frozen=True, kw_only=True, slots=True)
class UncutOperator:
    """An operator without a chunk rule.

    Fields:
        module: FQN of the first module that calls it, `""` for the model itself.
        nbytes: bytes of the results of all its calls.
    """

    target: str
    module: str
    nbytes: int

    @classmethod
    def largest(cls, graphs: Iterable[ScopeGraph]) -> UncutOperator | None:
        """Return the one whose results have the most bytes, `None` where there is none."""
        found: dict[str, UncutOperator] = {}
        for node in (node for scope in graphs for node in scope.graph.nodes):
            if node.op == "call_function" and not is_cut(node):
                first = found.get(str(node.target))
                found[str(node.target)] = cls(
                    target=str(node.target),
                    module=node.meta["module"] if first is None else first.module,
                    nbytes=sum(map(bytes_of, tensors_of(node))) + (first.nbytes if first else 0),
                )
        return max(found.values(), key=lambda each: each.nbytes, default=None)


def _infeasible(
    where: str, budget_bytes: int, minimum: int, opaque: Mapping[str, str], uncut: UncutOperator | None
) -> InfeasibleBudget:
    """Return the refusal of a budget.

    Args:
        where: the configuration path of the budget.
        minimum: smallest activation peak that a plan reaches.
        opaque: FQNs of modules that nothing cuts, with the reason.
        uncut: operator that no rule cuts, which is named if its results take much of the smallest peak.
    """
    whole = "".join(f"; {fqn!r} is not cut: {reason}" for fqn, reason in list(opaque.items())[:1])
    more = f"; nor are {len(opaque) - 1} more" if len(opaque) > 1 else ""
    if uncut is not None and uncut.nbytes * _MUCH >= minimum:
        caller = repr(uncut.module) if uncut.module else "the model"
        more += f"; nothing cuts {uncut.target}, which {caller} calls"
    return InfeasibleBudget(where, budget_bytes, minimum, f"{whole}{more}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkPlan:
    """The parts of a model's forward that run in chunks, and the bytes that follow.

    Fields:
        budget_bytes: the budget; `None` asks for the smallest peak.
        predicted_peak_bytes: activation peak of a pass of the planned model.
        unchunked_peak_bytes: activation peak of the model as it is.
        minimum_feasible_bytes: smallest peak that the search has seen; the unchunked peak where the model
            fits as it is, because there was no search.
        predicted_slowdown: time with the plan / time without, by the cost model.
        training: true where the pass has a backward.
        regions: loops in the order of scopes and of operators.
        recomputed: FQNs of scopes whose whole forward, loops included, runs again in backward.
        opaque: FQNs of modules that run as they are, with the reason.
        schedulers: decide the schedule of each scope, by FQN.
        loss: loss that the planned model goes on to where its last input is `LossInputs`; `None`: it ends
            with its results.
        batch: samples of a chunk of the loop over the batch, which stands around the whole model; `None`: it
            runs on all samples at once.
        proofs: what is proven of the plan's programs; all others are proven in their first call.
    """

    budget_bytes: int | None
    predicted_peak_bytes: int
    unchunked_peak_bytes: int
    minimum_feasible_bytes: int
    predicted_slowdown: float
    training: bool
    regions: tuple[PlannedRegion, ...]
    recomputed: tuple[str, ...] = ()
    opaque: Mapping[str, str] = field(default_factory=dict)
    schedulers: Mapping[str, ScopeScheduler] = field(repr=False)
    loss: Loss | None = field(default=None, repr=False)
    batch: int | None = None
    proofs: Proofs = field(default_factory=Proofs, repr=False, compare=False)

    @classmethod
    def make(
        cls,
        model: nn.Module,
        sample: tuple[Any, ...],
        budget_bytes: int | None = None,
        *,
        fraction: float | None = None,
        kwargs: Mapping[str, Any] | None = None,
        training: bool = False,
        step: PlannedStep | None = None,
        where: str = "chunk.budget",
    ) -> ChunkPlan:
        """Return the fastest plan that was found whose peak is at most `budget_bytes`.

        Args:
            model: plain model; the meta device is enough. Its training flags are those of the planned pass.
            sample: positional inputs; meta tensors are enough.
            budget_bytes: bytes of activations, at least 1; `None` asks for the smallest peak.
            fraction: replaces `budget_bytes`: share of the unchunked peak, without the reserve.
            training: plan forward and backward, rather than forward alone.
            step: everything else in the training step.
            where: configuration path that messages name.

        A plan is proven on a part of the sample, unless that or the model has no values.

        Raises:
            InfeasibleBudget: no plan that was found keeps the budget.
            UnprovenError: what a module does is not what its program would do.
            StrategyError: the sample is no tuple, the budget is no positive number, or given twice, the model
                is chunked already, or its forward depends on data.
        """
        if fraction is not None:
            if budget_bytes is not None:
                raise StrategyError(where, "give one of budget_bytes and fraction, got both")
            require_number("chunk.fraction", fraction, "above 0 and at most 1", 1)
        planner = ChunkPlanner.of(model, sample, kwargs=kwargs, training=training, step=step, where=where)
        if fraction is not None:
            # what is reserved is an upper bound, and must not make the budget larger
            reserved_bytes = 0 if step is None else step.reserved_bytes
            budget_bytes = int((planner.unchunked_peak_bytes - reserved_bytes) * fraction)
        return planner.plan(budget_bytes).proven(model, sample, kwargs=kwargs, step=step)

    def proven(
        self,
        model: nn.Module,
        sample: tuple[Any, ...],
        *,
        kwargs: Mapping[str, Any] | None = None,
        step: PlannedStep | None = None,
    ) -> ChunkPlan:
        """Return the plan with what is proven of its programs; arguments are those of `make`.

        Raises:
            UnprovenError: what a module does is not what its program would do.
        """
        proof = PlanProof(
            model=unwrapped(model),
            sample=sample,
            kwargs=kwargs or {},
            step=step or PlannedStep(),
            training=self.training,
        )
        return replace(self, proofs=proof.of(self.schedulers, self.opaque, loss=self.loss, batch=self.batch))

    @classmethod
    def nothing(cls, budget_bytes: int, unchunked_bytes: int, *, training: bool) -> ChunkPlan:
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
        """Change `model` in place so that its scopes run the plan, and return it.

        Names of parameters and buffers, and hooks of the model and its blocks, stay as they are.

        Raises:
            StrategyError: the model is chunked already, or a module inside a scope has hooks, or a forward of
                its own.
        """
        plain = unwrapped(model)
        refuse_chunked(plain)
        inner = frozenset(fqn for fqn in self.schedulers if fqn)
        for fqn in self.schedulers:
            scope = plain.get_submodule(fqn)
            if "forward" in vars(scope):
                problem = f"{fqn or 'the model'!r} has a forward set on the instance, which no plan replaces"
                raise StrategyError("chunk", f"{problem}; set it after the plan is applied")
            refuse_unseen_calls(scope, fqn, frozenset() if fqn else inner, below(fqn, self.opaque))
        batch = None if self.batch is None else BatchLoop(length=self.batch)
        install(plain, self.schedulers, self.opaque, loss=self.loss, batch=batch, proofs=self.proofs)
        for forward in chunked_forwards(plain).values():
            forward.plan = self.to_dict() if forward.scopes or len(self.schedulers) == 1 else None
        return model

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values, without its schedulers."""
        names = ("budget_bytes", "predicted_peak_bytes", "unchunked_peak_bytes", "minimum_feasible_bytes")
        numbers = {name: getattr(self, name) for name in names}
        lists = ("operators", "kept")
        regions = [
            asdict(region) | {name: list(getattr(region, name)) for name in lists} for region in self.regions
        ]
        return {
            **numbers,
            "predicted_slowdown": self.predicted_slowdown,
            "regions": regions,
            "recomputed": list(self.recomputed),
            "opaque": dict(self.opaque),
            "with_loss": self.loss is not None,
            "batch": self.batch,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkPlanner:
    """A model recorded for one kind of pass, to be planned for one budget after the other.

    Fields:
        unchunked_peak_bytes: activation peak of the model as it is.
        where: configuration path that messages name.
        opaque: FQNs of modules that run as they are, with the reason.
    """

    unchunked_peak_bytes: int
    training: bool
    where: str
    opaque: Mapping[str, str]
    _machine: Machine
    _schedules: BatchSchedules | TrainingSchedules
    _loss: Loss | None = None
    _joined: Callable[[], TrainingSchedules | None] = lambda: None
    _uncut: UncutOperator | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        sample: tuple[Any, ...],
        *,
        kwargs: Mapping[str, Any] | None = None,
        training: bool = False,
        step: PlannedStep | None = None,
        where: str = "chunk.budget",
    ) -> ChunkPlanner:
        """Return the planner of `model`; arguments are those of `ChunkPlan.make`.

        Raises:
            StrategyError: the model is chunked already, or its forward depends on data.
        """
        if not isinstance(sample, tuple):
            raise StrategyError(
                where, f"the sample must be a tuple of positional inputs, got a {type(sample).__name__}"
            )
        refuse_attributes(where, tree_leaves((sample, dict(kwargs or {}))))
        plain = unwrapped(model)
        refuse_chunked(plain)
        _refuse_lazy(plain, where)
        rehearsal = Rehearsal.of(plain, sample, step or PlannedStep(), training=training, kwargs=kwargs)
        graphs, machine = rehearsal.recorded(where), machine_for(rehearsal.device)
        unchunked_peak_bytes = rehearsal.peak_bytes({})
        around = rehearsal.around() if training else {}

        @cache
        def joined() -> TrainingSchedules | None:
            if not training or step is None or step.loss is None or not step.may_join_loss:
                return None
            whole = replace(rehearsal, joins_loss=True)
            alone = schedules if isinstance(schedules, TrainingSchedules) else None
            joint_scopes = ModelScopes(whole.recorded(where), machine, around)
            return TrainingSchedules(joint_scopes, whole.peak_bytes, alone)

        schedules = (
            TrainingSchedules(ModelScopes(graphs, machine, around), rehearsal.peak_bytes)
            if training
            else BatchSchedules.of(rehearsal, graphs, machine, where)
        )
        return cls(
            unchunked_peak_bytes=unchunked_peak_bytes,
            training=training,
            where=where,
            opaque=rehearsal.opaque,
            _machine=machine,
            _schedules=schedules,
            _loss=None if step is None else step.loss,
            _joined=joined,
            _uncut=UncutOperator.largest(graphs),
        )

    def plan(self, budget_bytes: int | None) -> ChunkPlan:
        """Return the fastest plan that was found within the budget; `None` asks for the smallest peak.

        The loss joins the model only where less memory follows from it than can be kept without: results
        that are no longer whole can be compared with nothing.

        Raises:
            InfeasibleBudget: no plan that was found keeps the budget.
            StrategyError: the budget is no positive number of bytes.
        """
        if budget_bytes is not None and (type(budget_bytes) is not int or budget_bytes < 1):
            raise StrategyError(
                self.where, f"must be a whole number of bytes, at least 1, got {budget_bytes!r}"
            )
        unchunked_bytes = self.unchunked_peak_bytes
        if budget_bytes is not None and budget_bytes >= unchunked_bytes:
            return ChunkPlan.nothing(budget_bytes, unchunked_bytes, training=self.training)
        chosen, minimum = self._schedules.fastest(budget_bytes)
        joined = self._joined() if budget_bytes is None or chosen.peak_bytes > budget_bytes else None
        has_loss = False
        if joined is not None:
            other, least = joined.fastest(budget_bytes)
            has_loss, minimum = other.peak_bytes < chosen.peak_bytes, min(minimum, least)
            chosen = other if has_loss else chosen
        if budget_bytes is not None and chosen.peak_bytes > budget_bytes:
            raise _infeasible(self.where, budget_bytes, minimum, self.opaque, self._uncut)
        return ChunkPlan(
            budget_bytes=budget_bytes,
            predicted_peak_bytes=chosen.peak_bytes,
            unchunked_peak_bytes=unchunked_bytes,
            minimum_feasible_bytes=minimum,
            predicted_slowdown=chosen.slowdown,
            training=self.training,
            regions=chosen.regions(),
            recomputed=chosen.recomputed(),
            opaque=self.opaque,
            schedulers=chosen.schedulers(self._machine),
            loss=self._loss if has_loss else None,
            batch=chosen.batch,
        )


def require_number(where: str, value: Any, allowed: str, most: float) -> None:
    """Refuse a value that is no number, or not above 0 and at most `most`.

    Raises:
        StrategyError: naming `where`, and what is `allowed`.
    """
    if type(value) not in {int, float} or not 0 < value <= most:
        raise StrategyError(where, f"must be {allowed}, got {value!r}")


def _refuse_lazy(model: nn.Module, where: str) -> None:
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(each):
            problem = f"{name!r} is lazy and has no shape before a first call"
            raise StrategyError(where, f"{problem}; call the model once, then plan it")


def refuse_chunked(model: nn.Module) -> None:
    """Refuse a model with chunks. Raises StrategyError: it has some."""
    if any(isinstance(module, Chunked) for module in model.modules()):
        raise StrategyError(
            "chunk", f"{plain_class(model).__name__!r} is chunked already; plan a plain model"
        )
