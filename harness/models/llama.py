"""Llama's transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases.

Shapes: B batch, S sequence, D width, H query heads, R half a head's width, V vocabulary.

Source: Touvron et al. 2023, arXiv:2302.13971; Grattafiori et al. 2024, arXiv:2407.21783.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from harness.models.base import LanguageModelSpec, require_divides, require_shape
from harness.models.parts.initialisation import initialise
from harness.models.parts.rotary import (
    GroupedQueryAttention,
    attention_flops_per_token,
    require_even_heads,
    rotary_table,
)
from harness.models.parts.swiglu import SwiGLU

_NORM_EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaSpec(LanguageModelSpec):
    """A Llama of any size.

    Fields:
        n_layers: blocks L, >= 1.
        width: residual width D, a multiple of `n_heads`; heads are of even width.
        n_heads: query heads H, a multiple of `n_kv_heads`.
        n_kv_heads: key-value heads G, >= 1.
        hidden_width: width F of the feed-forward, >= 1.
        max_positions: length of the rotary table; the longest sequence.
        rope_theta: base of the rotary frequencies, >= 1.
        tied_head: the embedding's weight is the head's too.
    """

    n_layers: int
    width: int
    n_heads: int
    n_kv_heads: int
    hidden_width: int
    max_positions: int
    rope_theta: float
    tied_head: bool

    def __post_init__(self) -> None:
        require_shape(
            self,
            n_layers=self.n_layers,
            width=self.width,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            hidden_width=self.hidden_width,
            max_positions=self.max_positions,
            rope_theta=self.rope_theta,
        )
        require_divides("n_kv_heads", self.n_kv_heads, "n_heads", self.n_heads)
        require_even_heads(width=self.width, n_heads=self.n_heads)

    def build(self) -> nn.Module:
        """Return a `Llama`."""
        return Llama(self)

    def flops_per_token(self, sequence_length: int) -> int:
        """Return L·(4·D·(D + G·K) + 4·S·D + 6·D·F) + 2·D·V."""
        attention = attention_flops_per_token(
            width=self.width,
            kv_width=self.n_kv_heads * self.width // self.n_heads,
            sequence_length=sequence_length,
        )
        feed_forward = 6 * self.width * self.hidden_width
        return self.n_layers * (attention + feed_forward) + 2 * self.width * self.vocab_size

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Return Megatron's plan: heads and hidden units are split, everything else is whole."""
        return {
            "layers.*.attention.wq": "column",
            "layers.*.attention.wk": "column",
            "layers.*.attention.wv": "column",
            "layers.*.attention.wo": "row",
            "layers.*.feed_forward.gate": "column",
            "layers.*.feed_forward.up": "column",
            "layers.*.feed_forward.down": "row",
        }

    def tensor_parallel_sizes(self) -> dict[str, int]:
        """Return both numbers of heads and the hidden width."""
        return {
            "model.n_heads": self.n_heads,
            "model.n_kv_heads": self.n_kv_heads,
            "model.hidden_width": self.hidden_width,
        }

    def longest_sequence(self) -> int:
        """Return the length of the rotary table."""
        return self.max_positions


class Llama(nn.Module):
    """Next-token logits of a decoder-only transformer."""

    rotary: Tensor  # (positions, 2, R)

    def __init__(self, spec: LlamaSpec) -> None:
        super().__init__()
        self.embedding = nn.Embedding(spec.vocab_size, spec.width)
        self.layers = nn.ModuleList(LlamaBlock(spec) for _ in range(spec.n_layers))
        self.norm = nn.RMSNorm(spec.width, eps=_NORM_EPSILON)
        self.head = None if spec.tied_head else nn.Linear(spec.width, spec.vocab_size, bias=False)
        table = rotary_table(
            positions=spec.max_positions, head_width=spec.width // spec.n_heads, theta=spec.rope_theta
        )
        self.register_buffer("rotary", table, persistent=False)
        initialise(self, n_layers=spec.n_layers)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return logits of shape (B, S, V)."""
        rotary_S2R = self.rotary[: tokens_BS.size(1)]
        x_BSD = self.embedding(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD, rotary_S2R)
        x_BSD = self.norm(x_BSD)
        if (
            self.head is None
        ):  # a second use of one parameter, not a second name for it: nothing can untie them
            return functional.linear(x_BSD, self.embedding.weight)
        logits_BSV: Tensor = self.head(x_BSD)
        return logits_BSV


class LlamaBlock(nn.Module):
    """Attention, then feed-forward, each behind an RMSNorm and added to its input."""

    def __init__(self, spec: LlamaSpec) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(spec.width, eps=_NORM_EPSILON)
        self.attention = GroupedQueryAttention(
            width=spec.width, n_heads=spec.n_heads, n_kv_heads=spec.n_kv_heads, dropout=spec.dropout
        )
        self.feed_forward_norm = nn.RMSNorm(spec.width, eps=_NORM_EPSILON)
        self.feed_forward = SwiGLU(width=spec.width, hidden_width=spec.hidden_width)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, x_BSD: Tensor, rotary_S2R: Tensor) -> Tensor:
        """Return a tensor of shape (B, S, D)."""
        x_BSD = x_BSD + self.dropout(self.attention(self.attention_norm(x_BSD), rotary_S2R))
        output: Tensor = x_BSD + self.dropout(self.feed_forward(self.feed_forward_norm(x_BSD)))
        return output
