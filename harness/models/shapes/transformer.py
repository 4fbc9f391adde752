"""The shape of a transformer: L equal blocks of attention and feed-forward.

FLOPs are those of a token's forward, counted as `ModelSpec.flops_per_sample` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from harness.errors import ConfigError
from harness.models.base import (
    Batch,
    LanguageModelSpec,
    ModelSpec,
    require_divides,
    require_even_heads,
    require_parts,
    token_part,
)
from harness.models.parts import context_attention

if TYPE_CHECKING:
    from torch import nn

    from harness.models.parts.context_attention import Ring

_SPLIT_BY_ROW = ("wo", "down")


@dataclass(frozen=True, kw_only=True)
class TransformerSpec(ModelSpec):
    """A stack of blocks over tokens of any kind.

    Fields:
        n_layers: blocks L, >= 1.
        width: residual width D, a multiple of `n_heads`.
        n_heads: attention heads H, >= 1.
        hidden_width: width F of the feed-forward, >= 1.

    Attributes:
        feed_forward_linears: names of the linears in `layers.*.feed_forward` that tensor parallelism splits.
    """

    __slots__ = ()  # a class of images and one of language have this base with another: one has the slots
    feed_forward_linears: ClassVar[tuple[str, ...]] = ("up", "down")
    repeats_one_block: ClassVar[bool] = True
    scales_with_batch: ClassVar[bool] = True

    n_layers: int
    width: int
    n_heads: int
    hidden_width: int

    def __post_init__(self) -> None:
        ModelSpec.__post_init__(self)
        self.check_shape()

    def check_shape(self) -> None:
        """Refuse fields that do not fit each other: here, heads that do not divide the width."""
        require_divides("n_heads", self.n_heads, "width", self.width)

    def block_flops(self, n_tokens: int) -> int:
        """Return 4·D·(D + G·K) for the projections, 4·T·D for scores and values, and the feed-forward's.

        Args:
            n_tokens: tokens T that attend to each other.
        """
        projections = 4 * self.width * (self.width + self.kv_width())
        return projections + 4 * n_tokens * self.width + self.feed_forward_flops()

    def kv_width(self) -> int:
        """Return the width G·K of all keys, or all values, of a token."""
        return self.width

    def feed_forward_flops(self) -> int:
        """Return 4·D·F."""
        return 4 * self.width * self.hidden_width

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Return Megatron's plan: heads and hidden units are split, everything else is whole."""
        attention = (f"layers.*.attention.{name}" for name in ("wq", "wk", "wv", "wo"))
        feed_forward = (f"layers.*.feed_forward.{name}" for name in self.feed_forward_linears)
        return {
            fqn: "row" if fqn.endswith(_SPLIT_BY_ROW) else "column" for fqn in (*attention, *feed_forward)
        }

    def attend_over_parts(self, model: nn.Module, method: str, ring: Ring) -> None:
        """Tell every attention of the model."""
        context_attention.attend_over(model, method, ring)

    def tensor_parallel_sizes(self) -> dict[str, int]:
        """Return the heads and the hidden width."""
        return {"model.n_heads": self.n_heads, "model.hidden_width": self.hidden_width}


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderSpec(TransformerSpec, LanguageModelSpec):
    """A transformer that predicts the next token.

    Fields:
        max_positions: positions that the model has, learned or rotary; the longest sequence.

    Attributes:
        has_sequence_plan: whether blocks run on parts of a sequence under `mesh.sp`.
        embedded_by: FQN of what gives the first block's input.
    """

    has_sequence_plan: ClassVar[bool] = True
    embedded_by: ClassVar[str] = "embedding"

    max_positions: int

    def has_own_head(self) -> bool:
        """Say if the head is a linear, and not the embedding once more."""
        return False

    def split_plan(self, *, sp: bool, loss_parallel: bool) -> dict[str, str]:
        """Return the plan with the residual in parts of the sequence, logits in parts of the vocabulary."""
        if sp and not self.has_sequence_plan:
            problem = f"model {self.name!r} has no plan for it: its routers read whole sequences"
            raise ConfigError("mesh.sp", f"{problem}; use false")
        if loss_parallel and not self.has_own_head():
            problem = f"needs a head with a weight of its own, and model {self.name!r} has the embedding's"
            raise ConfigError("mesh.loss_parallel", f"{problem}; use false")
        plan = {**self.tensor_parallel_plan(), **(self._sequence_plan() if sp else {})}
        if loss_parallel:
            plan["head"] = "column_from_sequence_to_logits" if sp else "column_to_logits"
        return plan

    def check_context(self, *, sequence_length: int, cp: int, cp_method: str, tp: int) -> None:
        """Refuse lengths, and for `ulysses` heads, that ranks cannot share evenly."""
        require_parts("sequence_length", sequence_length, "mesh.cp", cp, "mesh.cp=1 without its options")
        require_even_heads(self.tensor_parallel_sizes(), cp=cp, cp_method=cp_method, tp=tp)

    def sequence_part(self, batch: Batch, part: int, parts: int) -> Batch:
        """Return a part of tokens and targets, with the positions of its tokens, of shape (S,)."""
        return token_part(batch, part, parts)

    def _sequence_plan(self) -> dict[str, str]:
        """Return the styles of modules between the linears that tensor parallelism splits."""
        block = {
            "attention": "gathered_input",
            "feed_forward": "gathered_input",
            "attention_norm": "sequence",
            "feed_forward_norm": "sequence",
            "attention.wo": "row_to_sequence",
            "feed_forward.down": "row_to_sequence",
        }
        ends = {self.embedded_by: "scattered", "norm": "sequence_gathered"}
        if self.has_own_head():
            ends |= {"norm": "sequence", "head": "column_from_sequence"}
            if self.embedded_by == "embedding":
                ends["embedding"] = "embedding_to_sequence"
        return {**{f"layers.*.{name}": style for name, style in block.items()}, **ends}

    def flops_per_token(self, sequence_length: int) -> int:
        """Return those of L blocks, and 2·D·V for the head."""
        return self.n_layers * self.block_flops(sequence_length) + 2 * self.width * self.vocab_size

    def longest_sequence(self) -> int:
        """Return the number of positions."""
        return self.max_positions

    def check_stages(self, stages: int) -> None:
        """Refuse a head that has no weight of its own, and too few blocks."""
        if not self.has_own_head():
            problem = f"the head of model {self.name!r} has no weight but that of the embedding"
            remedy = "and the two are in different stages; use model.tied_head=false"
            raise ConfigError("mesh.pp", f"{problem}, {remedy}")
        ModelSpec.check_stages(self, stages)


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryDecoderSpec(DecoderSpec):
    """A decoder with rotary positions and fewer key-value heads than query heads.

    Fields:
        n_heads: query heads H, a multiple of `n_kv_heads`; heads are of even width K.
        n_kv_heads: key-value heads G, >= 1.
        rope_theta: base of the rotary frequencies, >= 1.
    """

    n_kv_heads: int
    rope_theta: float

    def check_shape(self) -> None:
        """Refuse key-value heads that do not divide the heads, and heads that have no rotary pairs."""
        require_divides("n_kv_heads", self.n_kv_heads, "n_heads", self.n_heads)
        if self.width % (2 * self.n_heads):
            problem = f"heads must be of even width, got width {self.width} / {self.n_heads} heads"
            raise ConfigError("model.n_heads", problem)

    def kv_width(self) -> int:
        """Return the width of the G key-value heads."""
        return self.n_kv_heads * self.width // self.n_heads

    def tensor_parallel_sizes(self) -> dict[str, int]:
        """Return both numbers of heads and the hidden width."""
        return {
            "model.n_heads": self.n_heads,
            "model.n_kv_heads": self.n_kv_heads,
            "model.hidden_width": self.hidden_width,
        }
