"""Base of the chunk variants: a plan under a budget, applied to a model, shown and observed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from strategies.base import (
    Observation,
    PlannedStep,
    Strategy,
    StrategyError,
    Tolerance,
    held_chunks,
    refuse_named_inputs,
)
from strategies.budget import kept
from strategies.chunk import show
from strategies.chunk.planning import plan_json
from strategies.chunk.running import chunked_forward
from strategies.chunk.tolerance import REDUCED_TOLERANCE, TOLERANCE
from strategies.estimate import operator_cost
from strategies.regions import blocks
from strategies.tracing import shadow

if TYPE_CHECKING:
    from torch import Tensor, nn

    from strategies.chunk.planning.chunk_plan import ChunkPlan

_ALONE = PlannedStep()
_ALONGSIDE = "# chosen by ac=budget; bytes and time are of a step that recomputes every block"


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunking(Strategy):
    """A variant that runs parts of a model in chunks; a model in training mode is planned with its backward.

    Subclasses decide how many bytes activations may take.

    Measured in one step in fp32: gradients differ by up to 5e-6, as far as the plain ones are from float64.
    On the nano models in bf16 over two steps: outputs by up to 1.2e-2 and gradients by 5e-2.
    """

    tolerance: ClassVar[Tolerance | None] = TOLERANCE
    reduced_tolerance: ClassVar[Tolerance | None] = REDUCED_TOLERANCE
    views: ClassVar[tuple[str, ...]] = ("chunks", "memory")

    def apply(
        self, model: nn.Module, sample: tuple[Any, ...] = (), *, step: PlannedStep = _ALONE
    ) -> nn.Module:
        """Return `model`, planned for `step` and changed in place.

        Raises:
            InfeasibleBudget: no plan that was found keeps the budget.
            StrategyError: the model is unsuitable, or chunked already.
        """
        return self.planned(model, sample, step).apply(model)

    def planned(self, model: nn.Module, sample: tuple[Any, ...], step: PlannedStep) -> ChunkPlan:
        """Return the plan of `model`, whatever modes the caller is in.

        Raises:
            InfeasibleBudget: no plan that was found keeps the budget.
            StrategyError: the model is unsuitable, or chunked already.
        """
        with planning(sample):
            return self.plan(model, sample, step)

    def for_step(
        self, step: PlannedStep, plans: MutableMapping[str, Any] | None = None, key: str = ""
    ) -> Strategy:
        """Return the strategy that plans for `step`: with its loss, its other bytes and its regions."""
        return _ForStep(chunking=self, step=step, plans={} if plans is None else plans, key=key)

    def plan(self, model: nn.Module, sample: tuple[Any, ...], step: PlannedStep) -> ChunkPlan:
        """Return the plan of `model`.

        Raises:
            InfeasibleBudget: no plan that was found keeps the budget.
            StrategyError: the model is unsuitable, or chunked already.
        """
        raise NotImplementedError

    def has_loss(self, model: nn.Module) -> bool:
        """Return whether the plan on `model` goes on to the loss."""
        forward = chunked_forward.chunked_forwards(model).get("")
        return forward is not None and forward.loss is not None

    def check_units(self, model: nn.Module, units: Collection[str]) -> None:
        """Refuse an FSDP unit inside a chunked forward, which would never call the unit.

        Raises:
            StrategyError: naming the unit.
        """
        refuse_units([fqn for fqn in chunked_forward.chunked_forwards(model) if fqn], units)

    def view(
        self,
        name: str,
        model: nn.Module,
        sample: tuple[Any, ...],
        keywords: Mapping[str, Any] | None = None,
        *,
        step: PlannedStep = _ALONE,
    ) -> str:
        """Return the code with its loops (`chunks`), or the bytes operator by operator (`memory`)."""
        refuse_named_inputs(f"show={name}", keywords)
        view = show.code_view if name == "chunks" else show.memory_view
        return view(self.plan(model, sample, step), model, sample, step)

    def observe(self, model: nn.Module) -> Observation:
        """Return the chunk bodies that ran in the latest forward, and the plan."""
        forwards = chunked_forward.chunked_forwards(model)
        if not forwards:  # the plan put none on the model
            return Observation(unneeded="activations fit the budget as they are: nothing runs in chunks")
        plan = next((forward.plan for forward in forwards.values() if forward.plan is not None), None)
        return Observation(
            chunks=sum(forward.chunks() for forward in forwards.values()),
            plan=None if plan is None else {"chunk": plan},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FromPlan(Chunking):
    """The chunks that the plan of an activation checkpointing variant has chosen, as its file holds them."""

    plan_file: str

    @property
    def follows(self) -> bool:
        """True if the budget is that of activation checkpointing."""
        return True

    def plan(self, model: nn.Module, sample: tuple[Any, ...], step: PlannedStep) -> ChunkPlan:
        """Return the plan of the file.

        Raises:
            StrategyError: it is none of this version, or of another model.
        """
        held = held_chunks(Path(self.plan_file))
        plan = _read(held or {}, sample, step)
        known = dict(blocks.unwrapped(model).named_modules())
        unknown = next((fqn for fqn in plan.schedulers if fqn not in known), None)
        if unknown is not None:
            raise StrategyError(
                "ac.plan_file",
                f"has loops of {unknown!r}, which this model has not; use a plan of this model",
            )
        return plan.proven(model, sample, step=step)

    def view(
        self,
        name: str,
        model: nn.Module,
        sample: tuple[Any, ...],
        keywords: Mapping[str, Any] | None = None,
        *,
        step: PlannedStep = _ALONE,
    ) -> str:
        """Return a view of the chunks, whose bytes and time are not those of the step that was planned."""
        return f"{_ALONGSIDE}\n{Chunking.view(self, name, model, sample, keywords, step=step)}"


def _read(held: Mapping[str, Any], sample: tuple[Any, ...], step: PlannedStep) -> ChunkPlan:
    """Return the plan that `plan_to_json` gave, of which nothing is proven yet."""
    device = step.device or shadow.device_of(list(sample))
    loss = step.loss if step.may_join_loss else None
    return plan_json.plan_from_json(held, operator_cost.machine_for(device), loss)


@contextmanager
def planning(sample: tuple[Any, ...]) -> Iterator[None]:
    """Leave the modes that stand: planning has fake tensors of its own.

    Raises:
        StrategyError: there are no example inputs.
    """
    if not sample:
        raise StrategyError("chunk", "needs example inputs to plan with; give them as the sample")
    with torch.utils._python_dispatch._disable_current_modes():  # noqa: SLF001 (no public name)
        yield


def refuse_units(scopes: Collection[str], units: Collection[str]) -> None:
    """Refuse FSDP units that are none of the blocks with a forward of their own, where there are such.

    Raises:
        StrategyError: naming the unit.
    """
    for unit in units:
        if scopes and unit not in scopes:
            raise StrategyError("chunk", f"{unit!r} is an FSDP unit, and no block with a forward of its own")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shared:
    """A plan that equal models share; it holds nothing of the model that it was made with.

    Fields:
        plan: without its loss, which may hold the model.
        joins_loss: whether the planned model goes on to the loss.
    """

    plan: ChunkPlan
    joins_loss: bool

    @classmethod
    def of(cls, plan: ChunkPlan) -> _Shared:
        return cls(plan=replace(plan, loss=None), joins_loss=plan.loss is not None)

    def with_loss(self, loss: Callable[..., Tensor] | None) -> ChunkPlan:
        return replace(self.plan, loss=loss) if self.joins_loss else self.plan


@dataclass(frozen=True, kw_only=True, slots=True)
class _ForStep(Strategy):
    views: ClassVar[tuple[str, ...]] = Chunking.views

    chunking: Chunking
    step: PlannedStep
    plans: MutableMapping[str, _Shared]
    key: str

    def apply(self, model: nn.Module, sample: tuple[Any, ...] = ()) -> nn.Module:
        shared = self.plans.get(self.key)
        if shared is None:
            shared = self.plans[self.key] = _Shared.of(self._plan(model, sample))
        return shared.with_loss(self.step.loss).apply(model)

    def _plan(self, model: nn.Module, sample: tuple[Any, ...]) -> ChunkPlan:
        """Return the plan of `model`, which is not sought again where somebody keeps that of an equal one."""
        if not self.key or self.chunking.follows:  # the key says nothing of what a file holds
            return self.chunking.planned(model, sample, self.step)
        answers = kept.Answers("chunks", self.key)
        held = answers.read("plan")
        if held is not None:
            with planning(sample):
                return _read(held, sample, self.step).proven(model, sample, step=self.step)
        plan = self.chunking.planned(model, sample, self.step)
        if plan.batch is None:  # that of a pass without backward, which no file has
            answers.write("plan", plan_json.plan_to_json(plan))
        return plan

    def check_units(self, model: nn.Module, units: Collection[str]) -> None:
        self.chunking.check_units(model, units)

    def view(
        self,
        name: str,
        model: nn.Module,
        sample: tuple[Any, ...],
        keywords: Mapping[str, Any] | None = None,
    ) -> str:
        return self.chunking.view(name, model, sample, keywords, step=self.step)


def is_trained(model: nn.Module) -> bool:
    """Return whether a step of `model` has a backward."""
    is_learning = any(parameter.requires_grad for parameter in model.parameters())
    return blocks.unwrapped(model).training and torch.is_grad_enabled() and is_learning
