"""What libraries switch on, next to ours: bytes, recomputed FLOPs, verdict and distance of one step, here.

Each library runs through its own functions (`ac=transformers`, `accelerate`, `trl`, `torchtitan`; fairscale
by a function), on small models of transformers. Next to each stands `ac=budget` at the peak that it measured,
which may never be dearer. A library that is not installed is a row that says so.

    python -m bench.peers --part shipped [--layers 6] [--width 64]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from torch import nn

import acbench
from acbench.comparing import Row
from bench.output import parser, publish
from bench.peers import libraries
from bench.table import table_of
from harness.report.facts.number_words import human_bytes, human_flops
from strategies import StrategyError, ac_variants
from strategies.regions.block_search import search_blocks

_SAMPLES, _TOKENS, _VOCABULARY, _HEADS = 4, 64, 256, 4
_VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("full", {}),
    ("full", {"early_stop": False}),
    ("selective_layer", {}),
    ("selective_op", {}),
    ("nested", {}),
    ("torch_remat", {}),
    ("transformers", {}),
    ("transformers", {"every_n_layers": 2}),
    ("transformers", {"use_reentrant": True}),
    ("accelerate", {}),
    ("trl", {}),
    ("trl", {"selective": False}),
    ("torchtitan", {"policy": "full"}),
    ("torchtitan", {"policy": "selective"}),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shipped:
    """One variant on one model.

    Fields:
        model: name of the model.
        variant: name of the variant, with its options.
        verdict: as records have it; `not run` where it could not be.
        reason: why the verdict is no `neutral`.
        saved_bytes: what forward leaves for backward.
        peak_bytes: the highest total of live storages in the step.
        recomputed_flops: FLOPs of forward operators that run again in backward.
        points_above: recomputed above the least of any schedule at this peak, in percent of a step's FLOPs.
        budget_flops: recomputed by `ac=budget` at this peak; `None` of what has no such plan next to it.
        budget_peak_bytes: the peak of that plan.
        budget_verdict: the verdict of that plan.
    """

    model: str
    variant: str
    verdict: str
    reason: str
    saved_bytes: int
    peak_bytes: int
    recomputed_flops: int
    points_above: float | None = None
    budget_flops: int | None = None
    budget_peak_bytes: int | None = None
    budget_verdict: str | None = None


def models(layers: int, width: int) -> Mapping[str, tuple[Callable[[], nn.Module], dict[str, torch.Tensor]]]:
    """Return what makes each model, and a batch of it."""
    sizes: dict[str, Any] = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_attention_heads": _HEADS,
    }
    text = sizes | {"num_key_value_heads": _HEADS, "vocab_size": _VOCABULARY, "use_cache": False}
    qwen = text | {"head_dim": width // _HEADS}
    dropped = text | {"attention_dropout": 0.1}
    tokens = torch.randint(_VOCABULARY, (_SAMPLES, _TOKENS), generator=torch.Generator().manual_seed(0))
    images = torch.rand(_SAMPLES, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    of_text = {"input_ids": tokens, "labels": tokens}
    of_images = {"pixel_values": images, "labels": torch.arange(_SAMPLES)}
    causal = transformers.AutoModelForCausalLM.from_config
    vit = transformers.ViTConfig(**sizes, image_size=32, patch_size=4, num_labels=_SAMPLES)
    # the router is a linear layer and a softmax; each token goes to two of four experts
    moe = text | {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": width}
    return {
        "llama": (partial(causal, transformers.LlamaConfig(**text)), of_text),
        "llama, dropout": (partial(causal, transformers.LlamaConfig(**dropped)), of_text),
        "qwen3": (partial(causal, transformers.Qwen3Config(**qwen)), of_text),
        "olmoe": (partial(causal, transformers.OlmoeConfig(**moe)), of_text),
        "vit": (partial(transformers.ViTForImageClassification, vit), of_images),
    }


def rows(name: str, make: Callable[[], nn.Module], batch: Mapping[str, torch.Tensor]) -> Iterator[Shipped]:
    """Yield what each variant does to a model."""
    found = search_blocks(make())
    assert found is not None
    plans: dict[int, Row] = {}
    (plain,) = acbench.compare(make, dict(batch), variants=["none"], pairs=0)
    yield _shipped(name, plain)
    variants = [(" ".join([v, *(f"{key}={value}" for key, value in o.items())]), v, o) for v, o in _VARIANTS]
    for words, variant, options in [*variants, ("fairscale", "fairscale", {})]:
        try:
            strategy = _made(variant, options, found.layers_fqn)
        except StrategyError as error:
            yield _not_run(name, words, str(error))
            continue
        (row,) = acbench.compare(make, dict(batch), variants={words: strategy}, pairs=0)
        if row.peak_bytes not in plans:
            share = row.peak_bytes / plain.peak_bytes
            budget = _made("budget", {"fraction": min(1.0, share), "objective": "flops"}, found.layers_fqn)
            (plans[row.peak_bytes],) = acbench.compare(
                make, dict(batch), variants={"budget": budget}, pairs=0
            )
        yield _shipped(name, row, plans[row.peak_bytes])


def _made(variant: str, options: Mapping[str, Any], layers_fqn: str) -> Any:
    if variant == "fairscale":
        return _fairscale(layers_fqn)
    cls = ac_variants[variant]
    has_blocks = "layers_fqn" in cls.__dataclass_fields__
    return cls(**options, **({"layers_fqn": layers_fqn} if has_blocks else {}))


def _fairscale(layers_fqn: str) -> Callable[[nn.Module], None]:
    """Return a function that puts fairscale's wrapper around each block.

    Raises:
        StrategyError: fairscale is not installed.
    """
    if find_spec("fairscale") is None:
        raise StrategyError("ac", "fairscale is not installed: pip install fairscale")

    def wrapped(model: nn.Module) -> None:
        wrapper = libraries.imported("fairscale.nn.checkpoint").checkpoint_wrapper
        blocks = model.get_submodule(layers_fqn)
        for block_name, block in [*blocks.named_children()]:
            blocks.register_module(block_name, wrapper(block))

    return wrapped


def _shipped(model: str, row: Row, plan: Row | None = None) -> Shipped:
    return Shipped(
        model=model,
        variant=row.variant,
        verdict=row.verdict,
        reason=row.reason,
        saved_bytes=row.saved_bytes,
        peak_bytes=row.peak_bytes,
        recomputed_flops=row.recomputed_flops,
        points_above=row.points_above,
        budget_flops=None if plan is None else plan.recomputed_flops,
        budget_peak_bytes=None if plan is None else plan.peak_bytes,
        budget_verdict=None if plan is None else plan.verdict,
    )


def _not_run(model: str, words: str, reason: str) -> Shipped:
    return Shipped(
        model=model,
        variant=words,
        verdict="not run",
        reason=reason,
        saved_bytes=0,
        peak_bytes=0,
        recomputed_flops=0,
    )


def is_right(row: Shipped) -> bool:
    """Say if a row is as it must be: no wrong verdict, nothing below its bound, and no plan that is dearer.

    accelerate restores no random numbers, so its gradients differ with dropout; all others are neutral.
    """
    is_wrong = row.variant == "accelerate" and row.model == "llama, dropout"
    has_verdict = row.verdict in {"not run", "differs" if is_wrong else "neutral"}
    is_above = row.points_above is None or row.points_above >= 0
    if row.budget_flops is None or row.budget_peak_bytes is None:
        return has_verdict and is_above
    is_cheaper = row.budget_flops <= row.recomputed_flops and row.budget_peak_bytes <= row.peak_bytes
    return has_verdict and is_above and is_cheaper and row.budget_verdict == "neutral"


def main(words: Sequence[str] | None = None) -> int:
    """Run all, and return 1 where a verdict is not the one that is known."""
    options = parser(__doc__, "shipped", command="peers")
    options.add_argument("--layers", type=int, default=6)
    options.add_argument("--width", type=int, default=64)
    given = options.parse_args(words)
    chosen = models(given.layers, given.width)
    found = [row for name, (make, batch) in chosen.items() for row in rows(name, make, batch)]
    table = table_of(
        found,
        {
            "model": "model",
            "variant": "variant",
            "verdict": "verdict",
            "saved": lambda row: human_bytes(row.saved_bytes),
            "peak": lambda row: human_bytes(row.peak_bytes),
            "recomputed FLOPs": lambda row: human_flops(row.recomputed_flops),
            "above bound": lambda row: "-" if row.points_above is None else f"{row.points_above:.2f}",
            "budget there": lambda row: "-" if row.budget_flops is None else human_flops(row.budget_flops),
        },
    )
    protocol = {
        "layers": given.layers,
        "width": given.width,
        "heads": _HEADS,
        "samples": _SAMPLES,
        "tokens": _TOKENS,
        "vocabulary": _VOCABULARY,
        "dtype": "fp32",
        "budget_there": "ac=budget at the peak of the row",
    }
    publish(table, given.out, protocol=protocol, results=[asdict(row) for row in found])
    return 0 if all(map(is_right, found)) else 1


if __name__ == "__main__":
    sys.exit(main())
