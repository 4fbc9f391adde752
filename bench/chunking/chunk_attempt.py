"""What a chunk plan does: one budget tried on one model, forward or a training step.

Bytes are those of live storages that the pass makes. Times are medians of rounds in which the plain model and
the planned one take turns.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from harness.measure.memory.locator import Locator
from harness.measure.memory.totals import mark_backward, mark_forward
from harness.measure.speed.timing import host_time_s, in_turns
from harness.models.base import Batch
from strategies.base import PlannedStep
from strategies.chunk import ChunkPlan, InfeasibleBudget
from strategies.chunk.planning.chunk_plan import ChunkPlanner
from strategies.step.ledger import Kind, Ledger, is_activation
from strategies.step.live_storages import LiveStorages

ROUNDS = 5
"""Of plain and planned model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """What came of one budget.

    Fields:
        fraction: budget / activation peak as it is.
        unchunked_bytes: the activation peak as it is.
        predicted_bytes, measured_bytes: those of the plan; `None` where refused.
        minimum_bytes: the smallest peak that the search has seen.
        slowdown: median time / that of the plain model; `None` where it was not asked for.
        planning_s: of the plan; of the first budget with the recording.
        relative_difference: |result - result of the plain model| / its largest element, or a thousandth of
            the largest of all results, where that is more; of gradients in training.
    """

    fraction: float
    unchunked_bytes: int
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    minimum_bytes: int
    slowdown: float | None = None
    planning_s: float
    relative_difference: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunked:
    """A model under a plan.

    Fields:
        plan: that was found.
        model: the plain model's copy with the plan applied.
        results: what its pass gives; gradients of parameters in training.
    """

    plan: ChunkPlan
    model: nn.Module
    results: list[Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedPass:
    """A model and the pass that is planned.

    Fields:
        model: as it is, in the mode of the pass.
        batch: what it runs on.
        step: loss of a training step; `None` for a forward without autograd.
        expected: what the pass of the plain model gives.
        unchunked_bytes: its activation peak.
    """

    model: nn.Module
    batch: Batch
    step: PlannedStep | None
    expected: list[Tensor]
    unchunked_bytes: int

    @classmethod
    def of(cls, model: nn.Module, batch: Batch, step: PlannedStep | None) -> PlannedPass:
        """Run the plain model once and return the case."""
        expected = results_of(model, batch, step)
        unchunked = peak_bytes(model, batch, step)
        return cls(model=model, batch=batch, step=step, expected=expected, unchunked_bytes=unchunked)

    def planning(self) -> ChunkPlanner:
        """Return the planner, which has recorded the pass."""
        return ChunkPlanner.of(self.model, self.batch.inputs, training=self.step is not None, step=self.step)

    def attempt(
        self, planning: ChunkPlanner, fraction: float, *, started_s: float, is_timed: bool
    ) -> tuple[dict[str, Any], Chunked | None]:
        """Return the fields that every row has, and the model under its plan, `None` where it is refused.

        Args:
            planning: of this case.
            fraction: budget / activation peak as it is.
            started_s: when planning began.
            is_timed: whether the time of the pass is taken.
        """
        fields: dict[str, Any] = {"fraction": fraction, "unchunked_bytes": self.unchunked_bytes}
        try:
            plan = planning.plan(int(self.unchunked_bytes * fraction))
        except InfeasibleBudget as refusal:
            seconds = time.perf_counter() - started_s
            return fields | {"minimum_bytes": refusal.minimum_feasible_bytes, "planning_s": seconds}, None
        seconds = time.perf_counter() - started_s
        model = plan.apply(copy.deepcopy(self.model))
        chunked = Chunked(plan=plan, model=model, results=results_of(model, self.batch, self.step))
        fields |= {
            "predicted_bytes": plan.predicted_peak_bytes,
            "measured_bytes": peak_bytes(chunked.model, self.batch, self.step),
            "minimum_bytes": plan.minimum_feasible_bytes,
            "slowdown": self._slowdown(chunked.model) if is_timed else None,
            "planning_s": seconds,
            "relative_difference": relative_difference(chunked.results, self.expected),
        }
        return fields, chunked

    def _slowdown(self, planned: nn.Module) -> float:
        """Return the median time of `planned` / that of the plain model, in turns."""
        steps = [partial(run_pass, model, self.batch, self.step) for model in (planned, self.model)]
        ours_s, plain_s = in_turns(steps, warmup=0, turns=ROUNDS, clock=host_time_s)
        return median(ours_s) / median(plain_s)


def run_pass(model: nn.Module, batch: Batch, step: PlannedStep | None) -> None:
    """Run the pass of `results_of`, as what is timed."""
    results_of(model, batch, step)


def results_of(model: nn.Module, batch: Batch, step: PlannedStep | None) -> list[Tensor]:
    """Return what a forward gives, or the gradients of the parameters that a training step gives.

    Every pass draws the same random numbers.
    """
    torch.manual_seed(0)
    if step is None or step.loss is None:
        with torch.no_grad():
            return [leaf for leaf in tree_leaves(model(*batch.inputs)) if isinstance(leaf, Tensor)]
    step.loss(model(*batch.inputs), *step.loss_inputs).backward()  # type: ignore[no-untyped-call]
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found


def peak_bytes(model: nn.Module, batch: Batch, step: PlannedStep | None) -> int:
    """Return the measured peak of activations of a forward, or of a training step where there is a `step`."""
    return _lives(model, batch, step).peak(is_activation).nbytes


def peak_above_gradients_bytes(model: nn.Module, batch: Batch, step: PlannedStep) -> int:
    """Return the peak of activations and parameter gradients together, less all of these gradients.

    What is held while few gradients are there yet is free by this count, which others use.
    """
    ledger = _lives(model, batch, step)
    gradients = [life for life in ledger.lives if life.kind is Kind.GRADIENT]
    both = ledger.peak(lambda life: is_activation(life) or life.kind is Kind.GRADIENT)
    return both.nbytes - sum(life.nbytes for life in gradients)


def _lives(model: nn.Module, batch: Batch, step: PlannedStep | None) -> Ledger:
    locator = Locator(model, {})
    live = LiveStorages(locator, device="cpu")
    gc.collect()
    given = [leaf for leaf in tree_leaves((batch.inputs, batch.targets)) if isinstance(leaf, Tensor)]
    with torch.set_grad_enabled(step is not None), locator, live:
        live.add_standing([*model.parameters(), *model.buffers(), *given])
        outputs = model(*batch.inputs)
        if step is not None and step.loss is not None:
            loss = step.loss(outputs, *step.loss_inputs)
            mark_forward(live, model, (outputs, loss))
            del outputs
            locator.phase = "backward"
            loss.backward()  # type: ignore[no-untyped-call]
            mark_backward(live, model)
    model.zero_grad()
    return live.ledger


def relative_difference(results: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference of two tensors, as `Attempt` has it."""
    floor = 1e-3 * max(each.abs().max().item() for each in expected)
    return max(
        (one.double() - other.double()).abs().max().item() / max(other.abs().max().item(), floor)
        for one, other in zip(results, expected, strict=True)
    )
