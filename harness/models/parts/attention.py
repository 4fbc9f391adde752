"""Attention of every head with biased projections, between all tokens or to those before.

Shapes: B batch, S sequence, D width, H heads, K head width.
Under tensor parallelism a rank holds some of the H heads, so their number is never assumed.

Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional


class SelfAttention(nn.Module):
    """Every token attends to every token."""

    is_causal: ClassVar[bool] = False

    def __init__(self, *, width: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.head_width = width // n_heads
        self.dropout = dropout
        self.wq = nn.Linear(width, width)
        self.wk = nn.Linear(width, width)
        self.wv = nn.Linear(width, width)
        self.wo = nn.Linear(width, width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return the attention output of shape (B, S, D)."""
        q_BHSK, k_BHSK, v_BHSK = (
            linear(x_BSD).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for linear in (self.wq, self.wk, self.wv)
        )
        y_BHSK = functional.scaled_dot_product_attention(
            q_BHSK, k_BHSK, v_BHSK, dropout_p=self.dropout if self.training else 0.0, is_causal=self.is_causal
        )
        output: Tensor = self.wo(y_BHSK.transpose(1, 2).flatten(-2))
        return output


class CausalSelfAttention(SelfAttention):
    """Every token attends to itself and the tokens before it."""

    is_causal = True
