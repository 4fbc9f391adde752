"""Rotary positions and the grouped-query attention that uses them.

Shapes: B batch, S sequence, D width, H query heads, G key-value heads, K head width, R = K / 2.
Under tensor parallelism a rank holds some of the H and G heads, so their number is read off the
projections and never assumed.

Source: Su et al. 2021, arXiv:2104.09864 (rotary); Ainslie et al. 2023, arXiv:2305.13245 (grouped queries).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.errors import ConfigError


def require_even_heads(*, width: int, n_heads: int) -> None:
    """Refuse heads that cannot be split into rotary pairs.

    Raises:
        ConfigError: `width / n_heads` is no even number.
    """
    if width % (2 * n_heads):
        problem = f"heads must be of even width, got width {width} / {n_heads} heads"
        raise ConfigError("model.n_heads", problem)


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


class GroupedQueryAttention(nn.Module):
    """Causal attention of H query heads over G key-value heads, bias-free, with rotary positions."""

    def __init__(self, *, width: int, n_heads: int, n_kv_heads: int, dropout: float) -> None:
        super().__init__()
        self.head_width = width // n_heads
        self.dropout = dropout
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, n_kv_heads * self.head_width, bias=False)
        self.wv = nn.Linear(width, n_kv_heads * self.head_width, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x_BSD: Tensor, rotary_S2R: Tensor) -> Tensor:
        """Return the attention output of shape (B, S, D)."""
        q_BSHK, k_BSGK, v_BSGK = (
            linear(x_BSD).unflatten(-1, (-1, self.head_width)) for linear in (self.wq, self.wk, self.wv)
        )
        q_BSHK, k_BSGK = rotate(q_BSHK, rotary_S2R), rotate(k_BSGK, rotary_S2R)
        y_BHSK = functional.scaled_dot_product_attention(
            q_BSHK.transpose(1, 2),
            k_BSGK.transpose(1, 2),
            v_BSGK.transpose(1, 2),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=True,
        )
        output: Tensor = self.wo(y_BHSK.transpose(1, 2).flatten(-2))
        return output


def attention_flops_per_token(*, width: int, kv_width: int, sequence_length: int) -> int:
    """Return 2·(2·D² + 2·D·G·K) for the four projections and 4·S·D for scores and values."""
    return 4 * width * (width + kv_width) + 4 * sequence_length * width
