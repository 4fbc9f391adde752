"""Checkpointing of libraries, next to ours: bytes, recomputed FLOPs, verdict and distance, as in trials.

Each library runs through its own functions (`ac=transformers`, `accelerate`, `trl`, `torchtitan`,
`torch_remat`, `fairscale`, `deepspeed`), and so do a policy of torch and a function of a user's, on small
models of transformers. Each row is predicted, run and proven as `acbench` does. Next to each stands
`ac=budget` at the peak that it measured, which may never be dearer. Nothing is timed. A library that is not
installed is a row that says so.

    python -m bench.peers --part shipped [--layers 4] [--width 32]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from bench.output import parser, publish, status_of
from bench.table import table_of
from bench.trials import PRELOAD, experiments, records
from harness.errors import ConfigError
from harness.predict.prediction import predicted_step
from harness.ranks.agent import Agent
from harness.records.record import Record
from harness.report.facts.number_words import human_bytes, human_flops
from strategies import StrategyError

_SAMPLES, _TOKENS, _HEADS, _GIB = 4, 64, 4, 1 << 30
_FOREIGN = (
    "ac=transformers",
    "ac=transformers ac.every_n_layers=2",
    "ac=transformers ac.use_reentrant=true",
    "ac=accelerate",
    "ac=trl",
    "ac=trl ac.selective=false",
    "ac=torchtitan ac.policy=full",
    "ac=torchtitan ac.policy=selective",
    "ac=torch_remat",
    "ac=fairscale",
    "ac=deepspeed",
    "ac=deepspeed ac.use_reentrant=false",
    "ac=python ac.factory=examples.theirs:every_second",
    "ac=python ac.factory=bench.peers.shipped:saves_products",
)
_OURS = ("ac=full", "ac=selective_layer", "ac=selective_op")
_DROPOUT = "llama, dropout"
_WITH_DROPOUT = ("ac=accelerate", "ac=transformers", "ac=full")
"""Of the model with dropout: accelerate restores no random numbers."""


def saves_products(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Keep products of matrices, as a policy of torch."""
    is_product = operator in {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


@dataclass(frozen=True, kw_only=True, slots=True)
class Shipped:
    """One variant on one model.

    Fields:
        model: name of the model.
        variant: the variant with its options.
        is_foreign: whether others have made it.
        verdict: as records have it; `not run` where it could not be.
        reason: why the verdict is no `neutral`.
        saved_bytes: what forward leaves for backward.
        peak_bytes: the highest total of live storages in the step.
        recomputed_flops: FLOPs of forward operators that run again in backward.
        is_predicted: whether peaks and FLOPs of forward and backward were predicted as measured; `None` where
            routing decides and the prediction says that it assumes.
        points_above: recomputed above the least of any schedule at this peak, in percent of a step's FLOPs.
        budget_flops: recomputed by `ac=budget` at this peak; `None` of what has no such plan next to it.
        budget_peak_bytes: the peak of that plan.
        budget_verdict: the verdict of that plan.
    """

    model: str
    variant: str
    is_foreign: bool
    verdict: str
    reason: str = ""
    saved_bytes: int = 0
    peak_bytes: int = 0
    recomputed_flops: int = 0
    is_predicted: bool | None = None
    points_above: float | None = None
    budget_flops: int | None = None
    budget_peak_bytes: int | None = None
    budget_verdict: str | None = None


def models(layers: int, width: int) -> Mapping[str, tuple[str, ...]]:
    """Return the overrides of each model."""
    sizes = (
        f"model.n_layers={layers} model.width={width} model.n_heads={_HEADS} batch_size={_SAMPLES} "
        "model=hf mesh.device=cpu optimizer=sgd protocol=smoke protocol.parity_steps=1 protocol.timed_pairs=0"
    )
    text = f"{sizes} data=synthetic sequence_length={_TOKENS}"
    heads = f"head_dim:{width // _HEADS}"
    wide = f"intermediate_size:{2 * width},num_key_value_heads:{_HEADS}"
    image = f"intermediate_size:{2 * width},image_size:32,patch_size:4,num_labels:{_SAMPLES}"
    found = {
        "llama": f"{text} model.config_class=LlamaConfig model.overrides={{{wide}}}",
        _DROPOUT: f"{text} model.config_class=LlamaConfig model.overrides={{{wide},attention_dropout:0.1}}",
        "qwen3": f"{text} model.config_class=Qwen3Config model.overrides={{{wide},{heads}}}",
        # the router is a linear layer and a softmax; each token goes to two of four experts
        "olmoe": (
            f"{text} model.config_class=OlmoeConfig model.overrides="
            f"{{intermediate_size:{width},num_key_value_heads:{_HEADS},num_experts:4,num_experts_per_tok:2}}"
        ),
        "vit": f"{sizes} model.config_class=ViTConfig model.overrides={{{image}}}",
    }
    return {name: tuple(words.split()) for name, words in found.items()}


def rows(name: str, overrides: Sequence[str], agent: Agent, folder: Path) -> Iterator[Shipped]:
    """Yield what each variant does to a model, run in one rank."""
    variants = _WITH_DROPOUT if name == _DROPOUT else (*_FOREIGN, *_OURS)
    points, refused = {}, {}
    for words in ("ac=none", *variants):
        try:
            (points[words],) = experiments([[*overrides, *words.split()]])
        except (ConfigError, StrategyError) as error:
            refused[words] = str(error)
    found = dict(zip(points, records(agent, list(points.values()), folder), strict=True))
    peaks = {record.memory.peak_bytes: record for record in found.values() if record.memory is not None}
    budgets = [f"ac.budget_gib={math.ceil(peak / _GIB * 1e10) / 1e10}" for peak in peaks]
    plans = experiments([[*overrides, "ac=budget", each, "ac.objective=flops"] for each in budgets])
    judges = dict(zip(peaks, records(agent, plans, folder), strict=True))
    for words in ("ac=none", *variants):
        row = Shipped(
            model=name, variant=words.replace("ac=", "", 1), is_foreign=words in _FOREIGN, verdict="not run"
        )
        if words in refused:
            yield replace(row, reason=refused[words])
            continue
        record = found[words]
        if record.memory is None or record.work is None:
            yield replace(row, reason=str((record.error or {}).get("message", record.status)))
            continue
        judge = judges[record.memory.peak_bytes]
        yield replace(
            row,
            verdict=str(record.verdict),
            reason=record.note or "",
            saved_bytes=record.memory.saved_bytes,
            peak_bytes=record.memory.peak_bytes,
            recomputed_flops=record.work.recomputed_flops,
            is_predicted=_is_predicted(points[words], record),
            points_above=None if record.bound is None else record.bound.points_above,
            **({} if words == "ac=none" else _judged(judge)),
        )


def _judged(plan: Record) -> dict[str, Any]:
    assert plan.work is not None, plan.error
    assert plan.memory is not None
    return {
        "budget_flops": plan.work.recomputed_flops,
        "budget_peak_bytes": plan.memory.peak_bytes,
        "budget_verdict": plan.verdict,
    }


def _is_predicted(point: Any, record: Record) -> bool | None:
    """Say whether bytes and FLOPs were predicted; `None` where the prediction assumes something."""
    step = predicted_step(point)
    assert record.memory is not None
    assert record.work is not None
    if step is None or step.assumes:
        return None
    measured = (
        record.memory.peak_bytes,
        record.memory.host_peak_bytes,
        record.work.forward_flops,
        record.work.backward_flops,
    )
    return (step.peak_bytes, step.host_peak_bytes, step.forward_flops, step.backward_flops) == measured


def is_right(row: Shipped) -> bool:
    """Say if a row is as it must be: verdict, prediction, not below its bound, and no plan is dearer.

    accelerate restores no random numbers, so its gradients differ with dropout; all others are neutral.
    """
    if row.verdict == "not run":
        return True
    is_wrong = row.variant == "accelerate" and row.model == _DROPOUT
    has_verdict = row.verdict == ("differs" if is_wrong else "neutral")
    is_known = has_verdict and row.is_predicted is not False and (row.points_above or 0) >= 0
    if row.budget_flops is None or row.budget_peak_bytes is None:
        return is_known
    is_cheaper = row.budget_flops <= row.recomputed_flops and row.budget_peak_bytes <= row.peak_bytes
    return is_known and is_cheaper and row.budget_verdict in {"neutral", "inert"}


def main(words: Sequence[str]) -> int:
    """Run all, and return 1 where a row is not as it must be."""
    options = parser(__doc__, "shipped", command="peers")
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--width", type=int, default=32)
    options.add_argument("--model", choices=models(4, 32), action="append", help="of these alone")
    given = options.parse_args(words)
    chosen = models(given.layers, given.width)
    with Agent(PRELOAD) as agent, TemporaryDirectory() as folder:
        found = [
            row
            for name in given.model or chosen
            for row in rows(name, chosen[name], agent, Path(folder, name.replace(", ", "_")))
        ]
    table = table_of(
        found,
        {
            "model": "model",
            "variant": "variant",
            "verdict": "verdict",
            "saved": lambda row: human_bytes(row.saved_bytes),
            "peak": lambda row: human_bytes(row.peak_bytes),
            "predicted": "is_predicted",
            "recomputed FLOPs": lambda row: human_flops(row.recomputed_flops),
            "above bound": "points_above:.2f",
            "budget there": lambda row: "-" if row.budget_flops is None else human_flops(row.budget_flops),
        },
    )
    sizes = {"layers": given.layers, "width": given.width, "heads": _HEADS, "samples": _SAMPLES}
    fixed = {"dtype": "fp32", "optimizer": "sgd", "budget_there": "ac=budget at the peak of the row"}
    protocol = {**sizes, "tokens": _TOKENS, **fixed}
    publish(table, given.out, protocol=protocol, results=found)
    return status_of([row for row in found if not is_right(row)])
