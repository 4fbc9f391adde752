"""Chunk plans: bytes kept, bytes predicted, and time, for budgets from nearly all to a twentieth.

Each model runs forward without autograd, or a training step, as it is and under a plan for each budget. Bytes
are those of live storages that the pass makes; the plan's prediction is compared to the byte. Times, of some
of the budgets, are medians of rounds in which the plain model and the planned one take turns.

    python -m bench.chunking [--training] [--models "unet x 4" ...] [--timed 0.5 ...]
"""

from __future__ import annotations

import copy
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from bench.output import parser, publish
from bench.trials import experiments
from harness.measure.memory.locator import Locator
from harness.measure.memory.totals import mark_backward, mark_forward
from harness.models.base import Batch, LanguageModelSpec
from strategies.base import PlannedStep
from strategies.chunk import InfeasibleBudget
from strategies.chunk.planning.chunk_plan import Planner
from strategies.estimate.ledger import Kind, Ledger, is_activation
from strategies.estimate.live_storages import LiveStorages

_EVOFORMER = ("model=evoformer", "model.n_sequences=32", "model.n_residues=64", "batch_size=1")
MODELS = {
    "gpt 96 x 512": (
        "model=gpt_nano", "model.width=96", "model.hidden_width=384", "model.max_positions=512",
        "sequence_length=512", "batch_size=1",
    ),
    "gpt 768 x 1,024": ("model=gpt_small", "model.vocab_size=256", "sequence_length=1024", "batch_size=1"),
    "hf gpt2 96 x 512": ("model=hf", "model.width=96", "sequence_length=512", "batch_size=1"),
    "llama": ("model=llama_nano", "sequence_length=1024", "batch_size=1"),
    "vit": ("model=vit_nano", "batch_size=4"),
    "vit large": ("model=vit_large", "batch_size=1"),
    "evoformer block": (*_EVOFORMER, "model.n_layers=1"),
    "evoformer stack": (*_EVOFORMER, "model.n_layers=4"),
    "extra msa block": (
        *_EVOFORMER, "model.n_layers=1", "model.global_columns=true", "model.msa_width=64",
        "model.msa_head_width=8",
    ),
    "unet x 4": ("model=unet", "batch_size=4"),
    "unet x 8": ("model=unet", "batch_size=8"),
}  # fmt: skip
FRACTIONS = tuple(percent / 100 for percent in range(95, 0, -5))
TIMED = (0.5, 0.25, 0.2, 0.1)
_ROUNDS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetResult:
    """One budget for one model.

    Fields:
        unchunked_bytes, budget_bytes: activation peaks as it is, and asked for.
        predicted_bytes, measured_bytes: those of the plan; `None` where refused.
        minimum_bytes: the smallest peak that the search has seen.
        slowdown: median time / that of the plain model; `None` where it was not asked for.
        estimated_slowdown: the same by the cost model.
        chunks: bodies that run in a forward.
        planning_s: of the plan; the first budget of a model includes its recording.
        relative_difference: |result - result of the plain model| / its largest element, or a thousandth of
            the largest of all results, where that is more; of gradients in training.
        error, plain_error: the same between the planned or the plain model's result and that in float64,
            where both round.
    """

    model: str
    fraction: float
    unchunked_bytes: int
    budget_bytes: int
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    minimum_bytes: int
    slowdown: float | None = None
    estimated_slowdown: float | None = None
    chunks: int = 0
    planning_s: float
    relative_difference: float | None = None
    error: float | None = None
    plain_error: float | None = None

    @property
    def is_as_claimed(self) -> bool:
        """Whether the budget is kept, and the prediction covers what was measured."""
        if self.predicted_bytes is None or self.measured_bytes is None:
            return self.minimum_bytes > self.budget_bytes
        return self.measured_bytes <= self.predicted_bytes <= self.budget_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    """A model, what it runs on, and what it gives as it is, and in float64."""

    name: str
    model: nn.Module
    batch: Batch
    run: Callable[[nn.Module], list[Tensor]]
    expected: list[Tensor]
    exact: list[Tensor]
    step: PlannedStep | None
    timed: Sequence[float]


def main() -> int:
    """Measure, print the table, write the JSON; return 1 where a budget or a prediction does not hold."""
    arguments = parser(__doc__, "chunking")
    arguments.add_argument("--training", action="store_true", help="plan forward and backward")
    arguments.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    arguments.add_argument(
        "--timed", nargs="*", type=float, default=TIMED, help="budgets whose time is taken"
    )
    chosen = arguments.parse_args()
    torch.set_num_threads(1)
    rows = [row for name in chosen.models for row in _rows(name, chosen.timed, training=chosen.training)]
    protocol = {
        "models": {name: MODELS[name] for name in chosen.models},
        "fractions": FRACTIONS,
        "rounds": _ROUNDS,
        "training": chosen.training,
    }
    publish(_table(rows), chosen.out, protocol=protocol, results=[asdict(row) for row in rows])
    wrong = [row for row in rows if not row.is_as_claimed]
    for row in wrong:
        sys.stderr.write(f"not as claimed: {row}\n")
    return int(bool(wrong))


def _rows(name: str, timed: Sequence[float], *, training: bool) -> Iterator[BudgetResult]:
    (experiment,) = experiments([MODELS[name]])
    torch.manual_seed(0)
    spec = experiment.model
    model = spec.build().train(training)
    batch = _batch(spec, experiment.batch_size, experiment.sequence_length)

    def loss(outputs: Any, targets: Any) -> Tensor:
        return spec.loss(outputs, Batch(inputs=batch.inputs, targets=targets))

    def run(each: nn.Module, inputs: Any = batch.inputs) -> list[Tensor]:
        if not training:
            with torch.no_grad():
                return [leaf for leaf in tree_leaves(each(*inputs)) if isinstance(leaf, Tensor)]
        loss(each(*inputs), batch.targets).backward()  # type: ignore[no-untyped-call]
        found = [parameter.grad for parameter in each.parameters() if parameter.grad is not None]
        each.zero_grad()
        return found

    step = PlannedStep(loss=loss, loss_inputs=(batch.targets,))
    expected = run(model)
    case = _Case(
        name=name,
        model=model,
        batch=batch,
        run=run,
        expected=expected,
        exact=run(copy.deepcopy(model).double(), tree_map_only(Tensor, _doubled, batch.inputs)),
        step=step if training else None,
        timed=timed,
    )
    unchunked = peak_bytes(model, batch, case.step)
    start = time.perf_counter()
    planning = Planner.of(model, batch.inputs, training=training, step=case.step)
    for fraction in FRACTIONS:
        yield _row(case, planning, unchunked, fraction, start)
        start = time.perf_counter()


def _row(case: _Case, planning: Planner, unchunked: int, fraction: float, start: float) -> BudgetResult:
    model, batch, step = case.model, case.batch, case.step
    budget = int(unchunked * fraction)
    known: dict[str, Any] = {
        "model": case.name,
        "fraction": fraction,
        "unchunked_bytes": unchunked,
        "budget_bytes": budget,
    }
    try:
        plan = planning.plan(budget)
    except InfeasibleBudget as refusal:
        seconds = time.perf_counter() - start
        return BudgetResult(**known, minimum_bytes=refusal.minimum_feasible_bytes, planning_s=seconds)
    seconds = time.perf_counter() - start
    planned = plan.apply(copy.deepcopy(model))
    results = case.run(planned)
    return BudgetResult(
        **known,
        predicted_bytes=plan.predicted_peak_bytes,
        measured_bytes=peak_bytes(planned, batch, step),
        minimum_bytes=plan.minimum_feasible_bytes,
        slowdown=slowdown(lambda: case.run(planned), lambda: case.run(model))
        if fraction in case.timed
        else None,
        estimated_slowdown=plan.predicted_slowdown,
        chunks=sum(region.chunks for region in plan.regions),
        planning_s=seconds,
        relative_difference=relative_difference(results, case.expected),
        error=relative_difference(results, case.exact),
        plain_error=relative_difference(case.expected, case.exact),
    )


def _batch(spec: Any, batch_size: int, sequence_length: int) -> Batch:
    if isinstance(spec, LanguageModelSpec):
        tokens = torch.randint(0, spec.vocab_size, (batch_size, sequence_length))
        return Batch(inputs=(tokens,), targets=tokens)
    drawn: Batch = spec.sample_batch(batch_size, np.random.default_rng(0))
    return drawn


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
    live = LiveStorages(locator, device="cpu", is_host=lambda: False)
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


def _doubled(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def relative_difference(results: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference of two tensors, as `BudgetResult` has it."""
    floor = 1e-3 * max(each.abs().max().item() for each in expected)
    return max(
        (one.double() - other.double()).abs().max().item() / max(other.abs().max().item(), floor)
        for one, other in zip(results, expected, strict=True)
    )


def slowdown(planned: Callable[[], Any], plain: Callable[[], Any]) -> float:
    """Return the median time of `planned` / that of `plain`, in turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(_ROUNDS):
        for run, taken in zip((planned, plain), times, strict=True):
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
    return median(times[0]) / median(times[1])


def _table(rows: list[BudgetResult]) -> Table:
    names = (
        "model", "budget", "of", "predicted", "measured", "smallest", "time", "difference",
        "from float64 (as it is)", "planned in",
    )  # fmt: skip
    table = Table(*names)
    for row in rows:
        refused = row.predicted_bytes is None
        table.add_row(
            row.model,
            f"{row.fraction:.0%}",
            f"{row.unchunked_bytes:,}",
            "refused" if refused else f"{row.predicted_bytes:,}",
            "" if refused else f"{row.measured_bytes:,}",
            f"{row.minimum_bytes:,}",
            "" if row.slowdown is None else f"{row.slowdown:.2f} x",
            "" if row.relative_difference is None else f"{row.relative_difference:.1e}",
            "" if row.error is None else f"{row.error:.1e} ({row.plain_error:.1e})",
            f"{row.planning_s:.1f} s",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
