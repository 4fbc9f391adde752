"""Chunk plans: bytes kept, bytes predicted, and time, for budgets from nearly all to a twentieth.

Each model runs forward without autograd, or a training step, as it is and under a plan for each budget. Bytes
are those of live storages that the pass makes; the plan's prediction is compared to the byte. Times, of some
of the budgets, are medians of rounds in which the plain model and the planned one take turns.

    python -m bench.chunking [--training] [--models "unet x 4" ...] [--timed 0.5 ...]
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from bench.chunking.chunk_attempt import ROUNDS, Attempt, PlannedPass, relative_difference, results_of
from bench.output import parser, publish, status_of
from bench.table import table_of
from bench.trials import experiments
from harness.models.base import Batch
from harness.trial.batches import batches
from strategies.base import PlannedStep

_EVOFORMER = ("model=evoformer", "model.n_sequences=32", "model.n_residues=64", "batch_size=1")
MODELS = {
    "gpt 96 x 512": (
        "model=gpt_nano", "model.width=96", "model.hidden_width=384", "model.max_positions=512",
        "sequence_length=512", "batch_size=1",
    ),
    "gpt 768 x 1,024": ("model=gpt_small", "model.vocab_size=256", "sequence_length=1024", "batch_size=1"),
    "hf gpt2 96 x 512": (
        "model=hf", "model.dropout=0", "model.width=96", "sequence_length=512", "batch_size=1",
    ),
    "llama": ("model=llama_nano", "sequence_length=1024", "batch_size=1"),
    "llama x 4": ("model=llama_nano", "sequence_length=1024", "batch_size=4"),
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


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetResult(Attempt):
    """One budget for one model.

    Fields:
        budget_bytes: activation peak that was asked for.
        estimated_slowdown: `slowdown` by the cost model.
        chunks: bodies that run in a forward.
        error, plain_error: `relative_difference` of the planned or the plain model's result from that in
            float64, where both round.
    """

    model: str
    budget_bytes: int
    estimated_slowdown: float | None = None
    chunks: int = 0
    error: float | None = None
    plain_error: float | None = None

    @property
    def is_as_claimed(self) -> bool:
        """Whether the budget is kept, and the prediction covers what was measured."""
        if self.predicted_bytes is None or self.measured_bytes is None:
            return self.minimum_bytes > self.budget_bytes
        return self.measured_bytes <= self.predicted_bytes <= self.budget_bytes


def main(words: Sequence[str]) -> int:
    """Measure, print the table, write the JSON; return 1 where a budget or a prediction does not hold."""
    arguments = parser(__doc__, "chunking")
    arguments.add_argument("--training", action="store_true", help="plan forward and backward")
    arguments.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    arguments.add_argument(
        "--timed", nargs="*", type=float, default=TIMED, help="budgets whose time is taken"
    )
    chosen = arguments.parse_args(words)
    torch.set_num_threads(1)
    rows = [row for name in chosen.models for row in _rows(name, chosen.timed, training=chosen.training)]
    protocol = {
        "models": {name: MODELS[name] for name in chosen.models},
        "fractions": FRACTIONS,
        "rounds": ROUNDS,
        "training": chosen.training,
    }
    publish(_table(rows), chosen.out, protocol=protocol, results=rows)
    return status_of([row for row in rows if not row.is_as_claimed])


def _rows(name: str, timed: Sequence[float], *, training: bool) -> Iterator[BudgetResult]:
    (experiment,) = experiments([MODELS[name]])
    torch.manual_seed(0)
    spec = experiment.model
    model = spec.build().train(training)
    batch = batches(experiment, torch.device("cpu"), 0)(0)

    def loss(outputs: Any, targets: Any) -> Tensor:
        return spec.loss(outputs, Batch(inputs=batch.inputs, targets=targets))

    step = PlannedStep(loss=loss, loss_inputs=(batch.targets,)) if training else None
    case = PlannedPass.of(model, batch, step)
    doubled = batch.changed(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    exact = results_of(copy.deepcopy(model).double(), doubled, step)
    start = time.perf_counter()
    planning = case.planning()
    for fraction in FRACTIONS:
        fields, chunked = case.attempt(planning, fraction, started_s=start, is_timed=fraction in timed)
        fields |= {"model": name, "budget_bytes": int(case.unchunked_bytes * fraction)}
        if chunked is not None:
            fields |= {
                "estimated_slowdown": chunked.plan.predicted_slowdown,
                "chunks": sum(region.chunks for region in chunked.plan.regions),
                "error": relative_difference(chunked.results, exact),
                "plain_error": relative_difference(case.expected, exact),
            }
        yield BudgetResult(**fields)
        start = time.perf_counter()


def _table(rows: list[BudgetResult]) -> Table:
    errors = estimate_errors(rows)
    caption = "no time was taken"
    if errors:
        worst = max(errors, key=lambda row: abs(errors[row]))
        caption = (
            f"estimated time / measured - 1: median of sizes {median(map(abs, errors.values())):.1%}, "
            f"worst {errors[worst]:+.1%} ({worst[0]} at {worst[1]:.0%})"
        )
    return table_of(
        rows,
        {
            "model": "model",
            "budget": "fraction:.0%",
            "of": "unchunked_bytes:,",
            "predicted": lambda row: "refused" if row.predicted_bytes is None else f"{row.predicted_bytes:,}",
            "measured": "measured_bytes:,",
            "smallest": "minimum_bytes:,",
            "time / as it is": "slowdown:.2f",
            "estimated": "estimated_slowdown:.2f",
            "difference": "relative_difference:.1e",
            "from float64": "error:.1e",
            "as it is, from float64": "plain_error:.1e",
            "planned in, s": "planning_s:.1f",
        },
        caption=caption,
    )


def estimate_errors(rows: Sequence[BudgetResult]) -> dict[tuple[str, float], float]:
    """Return estimated / measured slowdown - 1 of each model and budget whose time was taken."""
    return {
        (row.model, row.fraction): row.estimated_slowdown / row.slowdown - 1
        for row in rows
        if row.slowdown is not None and row.estimated_slowdown is not None
    }
