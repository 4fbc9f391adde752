"""Attention with one projection for queries, keys, values and output each, and rotary positions.

Shapes: B batch, S sequence, D width, H query heads, G key-value heads, K head width, R = K / 2.
Under tensor parallelism a rank holds some of the H and G heads, so their number is read off the
projections and never assumed.

Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2; Ainslie et al. 2023, arXiv:2305.13245 (grouped
queries); Su et al. 2021, arXiv:2104.09864 (rotary positions).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional


class SelfAttention(nn.Module):
    """Every token attends to every token.

    Args:
        width: residual width D.
        n_heads: query heads H.
        dropout: probability that a weight is dropped in training.
        n_kv_heads: key-value heads G, a divisor of H; `None` for one a query head.
    """

    attend: Callable[..., Tensor] | None = None
    """Stands for `scaled_dot_product_attention` where ranks hold parts of the sequence."""

    is_causal: ClassVar[bool] = False
    has_bias: ClassVar[bool] = True

    def __init__(self, *, width: int, n_heads: int, dropout: float, n_kv_heads: int | None = None) -> None:
        super().__init__()
        self.head_width = width // n_heads
        self.dropout = dropout
        self.is_grouped = n_kv_heads is not None
        kv_width = (n_kv_heads or n_heads) * self.head_width
        self.wq = nn.Linear(width, width, bias=self.has_bias)
        self.wk = nn.Linear(width, kv_width, bias=self.has_bias)
        self.wv = nn.Linear(width, kv_width, bias=self.has_bias)
        self.wo = nn.Linear(width, width, bias=self.has_bias)

    def forward(self, x_BSD: Tensor, rotary_S2R: Tensor | None = None) -> Tensor:
        """Return the attention output of shape (B, S, D); queries and keys are turned by `rotary_S2R`."""
        # one projection at a time: where nothing is rotated, each is transposed before the next is made
        heads = (linear(x_BSD).unflatten(-1, (-1, self.head_width)) for linear in (self.wq, self.wk, self.wv))
        if rotary_S2R is not None:
            q_BSHK, k_BSGK, v_BSGK = heads
            heads = (each for each in (rotate(q_BSHK, rotary_S2R), rotate(k_BSGK, rotary_S2R), v_BSGK))
        q_BHSK, k_BGSK, v_BGSK = (each.transpose(1, 2) for each in heads)
        attend = self.attend or functional.scaled_dot_product_attention
        y_BHSK = attend(
            q_BHSK,
            k_BGSK,
            v_BGSK,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.is_causal,
            enable_gqa=self.is_grouped,
        )
        output: Tensor = self.wo(y_BHSK.transpose(1, 2).flatten(-2))
        return output


class CausalSelfAttention(SelfAttention):
    """Every token attends to itself and the tokens before it."""

    is_causal = True


class GroupedQueryAttention(CausalSelfAttention):
    """Causal attention of H query heads over G key-value heads, without biases."""

    has_bias = False


def rotary_table(*, positions: int, head_width: int, theta: float) -> Tensor:
    """Return cosines and sines of shape (positions, 2, R) on the current default device."""
    frequency_R = theta ** -(torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    angle_SR = torch.outer(torch.arange(positions, dtype=torch.float32), frequency_R)
    return torch.stack((angle_SR.cos(), angle_SR.sin()), dim=1)


def rotate(x_BSHK: Tensor, rotary_S2R: Tensor) -> Tensor:
    """Return `x_BSHK` with the pair (i, i + R) of every head turned by its position's angle."""
    cos_S1R, sin_S1R = rotary_S2R.unsqueeze(-2).unbind(1)
    low_BSHR, high_BSHR = x_BSHK.chunk(2, dim=-1)
    turned = (low_BSHR * cos_S1R - high_BSHR * sin_S1R, high_BSHR * cos_S1R + low_BSHR * sin_S1R)
    return torch.cat(turned, dim=-1).type_as(x_BSHK)
