"""The points of the holdouts: models that no test uses, each set drawn once and never changed.

`FIRST` has eight decoders of `transformers`, and two models of timm. `SECOND` has seven further decoders, a
mixture of experts of `transformers` whose products are dense, a mixture of experts whose shapes depend on
data (its predictions assume equal shares), and two convolutional networks with batch norms; on one rank,
replicated and sharded over two, and compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_STEP = ("protocol=parity", "protocol.parity_steps=1", "data=synthetic", "mesh.device=cpu")
_TOKENS = ("batch_size=4", "sequence_length=48")
_ACS = ("none", "full", "selective_op", "nested")
VOCABULARY = 320
"""Tokens of every decoder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """A decoder of `transformers`, by its configuration class.

    Fields:
        layers_fqn: FQN of the blocks.
        sizes: width, n_layers, n_heads, and fields of the class.
        is_gated: whether its feed-forward is gated.
        is_tied: whether its head is its embedding.
    """

    layers_fqn: str
    sizes: Mapping[str, Any]
    is_gated: bool = False
    is_tied: bool = False

    @property
    def hidden_width(self) -> int:
        """Width of the feed-forward."""
        return int(self.sizes.get("intermediate_size", 4 * self.sizes["width"]))


def _decoder(width: int, n_layers: int, n_heads: int, hidden: int | None = None, **more: Any) -> Decoder:
    fields = {key: more.pop(key) for key in tuple(more) if key not in ("layers_fqn", "is_gated", "is_tied")}
    known = {} if hidden is None else {"intermediate_size": hidden}
    sizes = {"width": width, "n_layers": n_layers, "n_heads": n_heads, **known, **fields}
    return Decoder(sizes=sizes, **{"layers_fqn": "model.layers"} | more)


DECODERS: Mapping[str, Decoder] = {
    "PhiConfig": _decoder(96, 3, 6, 224),
    "StableLmConfig": _decoder(64, 4, 4, 176, is_gated=True),
    "GraniteConfig": _decoder(80, 3, 5, 208, is_gated=True, is_tied=True),
    "CohereConfig": _decoder(72, 3, 6, 160, is_gated=True, is_tied=True),
    "Starcoder2Config": _decoder(96, 2, 8, 320, is_tied=True),
    "BloomConfig": _decoder(64, 3, 8, layers_fqn="transformer.h", is_tied=True),
    "PersimmonConfig": _decoder(96, 3, 6, 288),
    "SmolLM3Config": _decoder(64, 4, 4, 192, is_gated=True, is_tied=True),
    "OlmoConfig": _decoder(80, 3, 5, 224, is_gated=True),
    "NemotronConfig": _decoder(96, 2, 6, 256, num_key_value_heads=6),
    "GlmConfig": _decoder(64, 3, 4, 160, is_gated=True, head_dim=16, pad_token_id=0),
    "HeliumConfig": _decoder(96, 3, 4, 192, is_gated=True, head_dim=24, pad_token_id=0),
    "ArceeConfig": _decoder(72, 4, 6, 240),
    "SeedOssConfig": _decoder(64, 3, 8, 144, is_gated=True, head_dim=8),
    "Gemma3TextConfig": _decoder(64, 4, 4, 176, is_gated=True, is_tied=True, head_dim=16, pad_token_id=0),
    "OlmoeConfig": _decoder(
        64, 2, 4, 48, is_gated=True, num_experts=6, num_experts_per_tok=2, pad_token_id=0,
        experts_implementation="batched_mm",
    ),
}  # fmt: skip
"""Sizes of a decoder by its configuration class."""

_BLOCKS = {
    "cait": "blocks",
    "xcit": "blocks",
    "routed": "blocks",
    "residual_cnn": "stages",
    "mobile_cnn": "stages",
}
"""FQN of the blocks of models of `tests.matrix.holdout_models`."""

FIRST = (*tuple(DECODERS)[:8], "cait")
SECOND = (*tuple(DECODERS)[8:], "routed", "residual_cnn", "mobile_cnn")


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One trial of a holdout."""

    model: str
    mesh: str
    ac: str
    dtype: str = "fp32"
    compile: str = field(default="none")

    @property
    def overrides(self) -> list[str]:
        """The command line of the point."""
        named = ("ac", "mesh", "dtype", "compile")
        chosen = [*(f"{name}={getattr(self, name)}" for name in named), *_STEP]
        if self.model in _BLOCKS:
            factory = f"model.factory=tests.matrix.holdout_models:{self.model}"
            return ["model=python", factory, f"model.layers_fqn={_BLOCKS[self.model]}", *chosen]
        decoder = DECODERS[self.model]
        further = [f"{key}: {value}" for key, value in decoder.sizes.items() if key not in _SIZES]
        return [
            *(
                "model=hf",
                "model.dropout=0",
                f"model.config_class={self.model}",
                f"model.layers_fqn={decoder.layers_fqn}",
                *_TOKENS,
            ),
            *(f"model.{name}={decoder.sizes[name]}" for name in _SIZES),
            *(f"model.vocab_size={VOCABULARY}", f"model.overrides={{{', '.join(further)}}}"),
            *chosen,
        ]


_SIZES = ("width", "n_layers", "n_heads")


def is_decoder(point: Point) -> bool:
    """Whether formulas of others know the point's kind of model."""
    return point.model in DECODERS


def points_of(models: Sequence[str]) -> Iterator[Point]:
    """Yield the points of models, of either set."""
    for model in models:
        yield from (Point(model=model, mesh="single", ac=ac) for ac in _ACS)
        yield from _further_of_second(model) if model in SECOND else _further_of_first(model)


def _further_of_first(model: str) -> Iterator[Point]:
    """Yield what a model of the first set has beside variants on one rank."""
    if model in _BLOCKS:
        return
    yield Point(model=model, mesh="shard2", ac="full")
    if model in {"PhiConfig", "BloomConfig"}:
        yield Point(model=model, mesh="single", ac="offload")
        yield Point(model=model, mesh="single", ac="full", dtype="bf16")
        yield Point(model=model, mesh="ddp2", ac="selective_op")


def _further_of_second(model: str) -> Iterator[Point]:
    """Yield what a model of the second set has beside variants on one rank."""
    yield Point(model=model, mesh="shard2", ac="full")
    yield Point(model=model, mesh="ddp2", ac="selective_op")
    yield Point(model=model, mesh="single", ac="full", compile="aot_eager")
    if model in {"OlmoConfig", "residual_cnn"}:
        yield Point(model=model, mesh="single", ac="offload")
