"""What libraries switch on, next to ours: bytes, recomputed FLOPs and verdict of one step, here.

Each library runs through its own functions (`ac=transformers`, `accelerate`, `trl`, `torchtitan`; fairscale
by a function), on small models of transformers. `budget` plans for the peak of `full`. A library that is not
installed is a row that says so.

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
from bench.output import parser, publish
from bench.peers import libraries
from bench.table import table_of
from harness.report.facts.number_words import human_bytes, human_flops
from strategies import Strategy, StrategyError, ac_variants
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
    """

    model: str
    variant: str
    verdict: str
    reason: str
    saved_bytes: int
    peak_bytes: int
    recomputed_flops: int


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
    return {
        "llama": (partial(causal, transformers.LlamaConfig(**text)), of_text),
        "llama, dropout": (partial(causal, transformers.LlamaConfig(**dropped)), of_text),
        "qwen3": (partial(causal, transformers.Qwen3Config(**qwen)), of_text),
        "vit": (partial(transformers.ViTForImageClassification, vit), of_images),
    }


def rows(name: str, make: Callable[[], nn.Module], batch: Mapping[str, torch.Tensor]) -> Iterator[Shipped]:
    """Yield what each variant does to a model."""
    found = search_blocks(make())
    assert found is not None
    peak_bytes: dict[str, int] = {}
    plain = _row(name, "none", "none", make, batch)
    yield plain
    for variant, options in _VARIANTS:
        words = " ".join([variant, *(f"{option}={value}" for option, value in options.items())])
        try:
            strategy = _made(variant, options, found.layers_fqn)
        except StrategyError as error:
            yield _not_run(name, words, str(error))
            continue
        row = _row(name, words, strategy, make, batch)
        peak_bytes[words] = row.peak_bytes
        yield row
    yield _row(name, "fairscale", _fairscale(found.layers_fqn), make, batch)
    share = peak_bytes["full"] / plain.peak_bytes
    yield _row(
        name, "budget at that of full", _made("budget", {"fraction": share}, found.layers_fqn), make, batch
    )


def _made(variant: str, options: Mapping[str, Any], layers_fqn: str) -> Strategy:
    cls = ac_variants[variant]
    has_blocks = "layers_fqn" in cls.__dataclass_fields__
    return cls(**options, **({"layers_fqn": layers_fqn} if has_blocks else {}))


def _fairscale(layers_fqn: str) -> Callable[[nn.Module], None]:
    def wrapped(model: nn.Module) -> None:
        wrapper = libraries.imported("fairscale.nn.checkpoint").checkpoint_wrapper
        blocks = model.get_submodule(layers_fqn)
        for block_name, block in [*blocks.named_children()]:
            blocks.register_module(block_name, wrapper(block))

    return wrapped


def _row(
    model: str,
    words: str,
    variant: Any,
    make: Callable[[], nn.Module],
    batch: Mapping[str, torch.Tensor],
) -> Shipped:
    if words == "fairscale" and find_spec("fairscale") is None:
        return _not_run(model, words, "fairscale is not installed: pip install fairscale")
    (row,) = acbench.compare(make, dict(batch), variants={words: variant}, pairs=0)
    return Shipped(
        model=model,
        variant=words,
        verdict=row.verdict,
        reason=row.reason,
        saved_bytes=row.saved_bytes,
        peak_bytes=row.peak_bytes,
        recomputed_flops=row.recomputed_flops,
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
    """Say if a verdict is the one that is known: accelerate restores no random numbers, all others do."""
    is_wrong = row.variant == "accelerate" and row.model == "llama, dropout"
    return row.verdict in {"not run", "differs" if is_wrong else "neutral"}


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
        "fraction_of_budget": "peak of full / plain peak",
    }
    publish(table, given.out, protocol=protocol, results=[asdict(row) for row in found])
    return 0 if all(map(is_right, found)) else 1


if __name__ == "__main__":
    sys.exit(main())
