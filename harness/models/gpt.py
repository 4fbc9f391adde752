"""GPT-2's transformer: learned positions, LayerNorm before each branch, biased linears, tied head.

Shapes: B batch, S sequence, D width, F hidden width, V vocabulary.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.models.base import LanguageModelSpec, require_divides, require_shape
from harness.models.parts.attention import CausalSelfAttention
from harness.models.parts.initialisation import initialise


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTSpec(LanguageModelSpec):
    """A GPT-2 of any size.

    Fields:
        n_layers: blocks L, >= 1.
        width: residual width D, a multiple of `n_heads`.
        n_heads: attention heads H, >= 1.
        hidden_width: width F of the feed-forward, >= 1.
        max_positions: learned positions; the longest sequence.
    """

    n_layers: int
    width: int
    n_heads: int
    hidden_width: int
    max_positions: int

    def __post_init__(self) -> None:
        require_shape(
            self,
            n_layers=self.n_layers,
            width=self.width,
            n_heads=self.n_heads,
            hidden_width=self.hidden_width,
            max_positions=self.max_positions,
        )
        require_divides("n_heads", self.n_heads, "width", self.width)

    def build(self) -> nn.Module:
        """Return a `GPT`."""
        return GPT(self)

    def flops_per_token(self, sequence_length: int) -> int:
        """Return L·(8·D² + 4·S·D + 4·D·F) + 2·D·V."""
        attention = 8 * self.width**2 + 4 * sequence_length * self.width
        feed_forward = 4 * self.width * self.hidden_width
        return self.n_layers * (attention + feed_forward) + 2 * self.width * self.vocab_size

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Return Megatron's plan: heads and hidden units are split, everything else is whole."""
        return {
            "layers.*.attention.wq": "column",
            "layers.*.attention.wk": "column",
            "layers.*.attention.wv": "column",
            "layers.*.attention.wo": "row",
            "layers.*.feed_forward.up": "column",
            "layers.*.feed_forward.down": "row",
        }

    def tensor_parallel_sizes(self) -> dict[str, int]:
        """Return the heads and the hidden width."""
        return {"model.n_heads": self.n_heads, "model.hidden_width": self.hidden_width}

    def longest_sequence(self) -> int:
        """Return the number of learned positions."""
        return self.max_positions


class GPT(nn.Module):
    """Next-token logits of a decoder-only transformer."""

    def __init__(self, spec: GPTSpec) -> None:
        super().__init__()
        self.embedding = nn.Embedding(spec.vocab_size, spec.width)
        self.position = nn.Embedding(spec.max_positions, spec.width)
        self.dropout = nn.Dropout(spec.dropout)
        self.layers = nn.ModuleList(GPTBlock(spec) for _ in range(spec.n_layers))
        self.norm = nn.LayerNorm(spec.width)
        initialise(self, n_layers=spec.n_layers)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return logits of shape (B, S, V)."""
        position_S = torch.arange(tokens_BS.size(1), device=tokens_BS.device)
        x_BSD = self.dropout(self.embedding(tokens_BS) + self.position(position_S))
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        # the tied head is a second use of one parameter, not a second name for it: nothing can untie them
        return functional.linear(self.norm(x_BSD), self.embedding.weight)


class GPTBlock(nn.Module):
    """Attention, then feed-forward, each behind a LayerNorm and added to its input."""

    def __init__(self, spec: GPTSpec) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(spec.width)
        self.attention = CausalSelfAttention(width=spec.width, n_heads=spec.n_heads, dropout=spec.dropout)
        self.feed_forward_norm = nn.LayerNorm(spec.width)
        self.feed_forward = FeedForward(width=spec.width, hidden_width=spec.hidden_width)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return a tensor of shape (B, S, D)."""
        x_BSD = x_BSD + self.dropout(self.attention(self.attention_norm(x_BSD)))
        output: Tensor = x_BSD + self.dropout(self.feed_forward(self.feed_forward_norm(x_BSD)))
        return output


class FeedForward(nn.Module):
    """`down(gelu(up(x)))` with GPT-2's tanh form of GELU."""

    def __init__(self, *, width: int, hidden_width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden_width)
        self.down = nn.Linear(hidden_width, width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return a tensor of shape (B, S, D)."""
        output: Tensor = self.down(functional.gelu(self.up(x_BSD), approximate="tanh"))
        return output
