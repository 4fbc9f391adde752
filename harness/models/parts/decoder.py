"""Decoder-only transformers: GPT, Llama, and Llama with experts.

Shapes: B batch, S sequence, D width, R half a head's width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.models.parts.attention import CausalSelfAttention, GroupedQueryAttention, rotary_table
from harness.models.parts.feed_forward import FeedForward, RoutedExperts, SwiGLU
from harness.models.parts.initialisation import initialise
from harness.models.parts.transformer_block import TransformerBlock
from harness.models.shapes.transformer import DecoderSpec, RotaryDecoderSpec

_RMSNorm = partial(nn.RMSNorm, eps=1e-5)


class Decoder(nn.Module):
    """Next-token logits: an embedding, blocks, a norm, and a head.

    Args:
        spec: sizes of everything.
        block: returns the next block.
        norm: the last norm.
        rotary: table of shape (positions, 2, R) that every block reads; `None` for positions that are
            learned and added to the embedding.
        tied_head: True where the embedding's weight is the head's too.
    """

    rotary: Tensor | None

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        block: Callable[[], TransformerBlock],
        norm: nn.Module,
        rotary: Tensor | None,
        tied_head: bool,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(spec.vocab_size, spec.width)
        self.position = nn.Embedding(spec.max_positions, spec.width) if rotary is None else None
        self.dropout = nn.Dropout(spec.dropout) if rotary is None else None
        self.layers = nn.ModuleList(block() for _ in range(spec.n_layers))
        self.norm = norm
        self.head = None if tied_head else nn.Linear(spec.width, spec.vocab_size, bias=False)
        self.register_buffer("rotary", rotary, persistent=False)
        initialise(self, n_layers=spec.n_layers)

    def forward(self, tokens_BS: Tensor, positions_S: Tensor | None = None) -> Tensor:
        """Return logits of shape (B, S, V).

        Args:
            tokens_BS: tokens of shape (B, S).
            positions_S: places of the tokens in their sequence; from 0 on where there are none.
        """
        positions = self._positions(tokens_BS, positions_S)
        x_BSD = self._embed(tokens_BS, positions)
        rotary = () if self.rotary is None else (positions,)
        for layer in self.layers:
            x_BSD = layer(x_BSD, *rotary)
        return self._logits(self.norm(x_BSD))

    def _logits(self, x_BSD: Tensor) -> Tensor:
        """Return logits of shape (B, S, V)."""
        if self.head is None:  # a second use of one parameter, not a second name: nothing can untie them
            return functional.linear(x_BSD, self.embedding.weight)
        logits_BSV: Tensor = self.head(x_BSD)
        return logits_BSV

    def _positions(self, tokens_BS: Tensor, positions_S: Tensor | None) -> Tensor:
        """Return what positions are read by: a table of shape (S, 2, R), or numbers of shape (S,)."""
        if positions_S is not None:
            return positions_S if self.rotary is None else self.rotary[positions_S]
        if self.rotary is not None:
            return self.rotary[: tokens_BS.size(1)]
        return torch.arange(tokens_BS.size(1), device=tokens_BS.device)

    def _embed(self, tokens_BS: Tensor, positions: Tensor) -> Tensor:
        """Return the first block's input of shape (B, S, D)."""
        if self.position is None or self.dropout is None:
            embedded: Tensor = self.embedding(tokens_BS)
            return embedded
        x_BSD: Tensor = self.dropout(self.embedding(tokens_BS) + self.position(positions))
        return x_BSD


class GPT(Decoder):
    """GPT-2: learned positions, LayerNorm, biased linears."""

    def __init__(self, spec: DecoderSpec, *, tied_head: bool) -> None:
        block, norm = partial(GPTBlock, spec), nn.LayerNorm(spec.width)
        super().__init__(spec, block=block, norm=norm, rotary=None, tied_head=tied_head)


class GPTBlock(TransformerBlock):
    """Causal attention, and a feed-forward with GELU in its tanh form."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__(
            spec,
            norm=nn.LayerNorm,
            attention=CausalSelfAttention(width=spec.width, n_heads=spec.n_heads, dropout=spec.dropout),
            feed_forward=FeedForward(
                width=spec.width, hidden_width=spec.hidden_width, dropout=None, approximate="tanh"
            ),
        )


class RotaryDecoder(Decoder):
    """Rotary positions, RMSNorm, no biases."""

    def __init__(
        self, spec: RotaryDecoderSpec, *, block: Callable[[], TransformerBlock], tied_head: bool
    ) -> None:
        rotary = rotary_table(
            positions=spec.max_positions, head_width=spec.width // spec.n_heads, theta=spec.rope_theta
        )
        super().__init__(spec, block=block, norm=_RMSNorm(spec.width), rotary=rotary, tied_head=tied_head)


class RotaryBlock(TransformerBlock):
    """Grouped-query attention, and a feed-forward without biases."""

    def __init__(self, spec: RotaryDecoderSpec, feed_forward: Callable[..., nn.Module]) -> None:
        attention = GroupedQueryAttention(
            width=spec.width, n_heads=spec.n_heads, n_kv_heads=spec.n_kv_heads, dropout=spec.dropout
        )
        gated = feed_forward(width=spec.width, hidden_width=spec.hidden_width)
        super().__init__(spec, norm=_RMSNorm, attention=attention, feed_forward=gated)


class Llama(RotaryDecoder):
    """Llama: SwiGLU behind the attention of each block."""

    def __init__(self, spec: RotaryDecoderSpec, *, tied_head: bool) -> None:
        super().__init__(spec, block=partial(LlamaBlock, spec, SwiGLU), tied_head=tied_head)


class LlamaBlock(RotaryBlock):
    """A block of Llama."""


class MoE(RotaryDecoder):
    """Mixtral: routed experts behind the attention of each block."""

    def __init__(self, spec: RotaryDecoderSpec, *, n_experts: int, top_k: int) -> None:
        experts = partial(RoutedExperts, n_experts=n_experts, top_k=top_k)
        super().__init__(spec, block=partial(MoEBlock, spec, experts), tied_head=False)


class MoEBlock(RotaryBlock):
    """A block of Mixtral."""
