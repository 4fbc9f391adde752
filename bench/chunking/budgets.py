"""Chunk plans: bytes kept, bytes predicted, and time, for budgets from nearly all to a twentieth.

Each model runs forward without autograd, or a training step, as it is and under a plan for each budget. Bytes
are those of live storages that the pass makes; the plan's prediction is compared to the byte. Times, of some
of the budgets, are medians of rounds in which the plain model and the planned one take turns.

    python -m bench.chunking [--training] [--models "unet x 4" ...] [--timed 0.5 ...]
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor
from torch.utils._pytree import tree_map_only

from bench.chunking.chunk_attempt import ROUNDS, PlannedPass, relative_difference, results_of
from bench.output import parser, publish
from bench.table import table_of
from bench.trials import experiments
from harness.models.base import Batch, LanguageModelSpec
from strategies.base import PlannedStep

_EVOFORMER = ("model=evoformer", "model.n_sequences=32", "model.n_residues=64", "batch_size=1")
MODELS = {
    "gpt 96 x 512": (
        "model=gpt_nano", "model.width=96", "model.hidden_width=384", "model.max_positions=512",
        "sequence_length=512", "batch_size=1",
    ),
    "gpt 768 x 1,024": ("model=gpt_small", "model.vocab_size=256", "sequence_length=1024", "batch_size=1"),
    "hf gpt2 96 x 512": (
        "model=hf",
        "model.dropout=0",
        "model.width=96",
        "sequence_length=512",
        "batch_size=1",
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

    step = PlannedStep(loss=loss, loss_inputs=(batch.targets,)) if training else None
    case = PlannedPass.of(model, batch, step)
    doubled = Batch(inputs=tree_map_only(Tensor, _doubled, batch.inputs), targets=batch.targets)
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


def _batch(spec: Any, batch_size: int, sequence_length: int) -> Batch:
    if isinstance(spec, LanguageModelSpec):
        tokens = torch.randint(0, spec.vocab_size, (batch_size, sequence_length))
        return Batch(inputs=(tokens,), targets=tokens)
    drawn: Batch = spec.sample_batch(batch_size, np.random.default_rng(0))
    return drawn


def _doubled(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _table(rows: list[BudgetResult]) -> Table:
    errors = estimate_errors(rows)
    caption = "no time was taken"
    if errors:
        worst = max(errors, key=lambda row: abs(errors[row]))
        caption = (
            f"estimated time / measured - 1: median of sizes {median(map(abs, errors.values())):.1%}, "
            f"worst {errors[worst]:+.1%} ({worst[0]} at {worst[1]:.0%})"
        )
    table = table_of(
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
    )
    table.caption = caption
    return table


def estimate_errors(rows: Sequence[BudgetResult]) -> dict[tuple[str, float], float]:
    """Return estimated / measured slowdown - 1 of each model and budget whose time was taken."""
    return {
        (row.model, row.fraction): row.estimated_slowdown / row.slowdown - 1
        for row in rows
        if row.slowdown is not None and row.estimated_slowdown is not None
    }
