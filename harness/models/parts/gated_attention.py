"""AlphaFold's attention: explicit scores, a bias of the pair representation, a gate on the output.

Shapes: B batch, N independent rows, L tokens of a row, D width, H heads, K head width, A = H·K.

Source: Jumper et al. 2021, doi:10.1038/s41586-021-03819-2, supplement 1.6.1, 1.6.2 and 1.7.2.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn


class _Projections(nn.Module):
    """Linears for queries, keys, values, gate and output."""

    shares_keys: ClassVar[bool] = False

    def __init__(self, *, width: int, n_heads: int, head_width: int) -> None:
        super().__init__()
        self.head_width = head_width
        kv_width = head_width if self.shares_keys else n_heads * head_width
        self.wq = nn.Linear(width, n_heads * head_width, bias=False)
        self.wk = nn.Linear(width, kv_width, bias=False)
        self.wv = nn.Linear(width, kv_width, bias=False)
        self.gate = nn.Linear(width, n_heads * head_width)
        self.wo = nn.Linear(n_heads * head_width, width)


class GatedAttention(_Projections):
    """Attention within each row, its output multiplied by a sigmoid gate (algorithms 7 and 8)."""

    def forward(self, x_BNLD: Tensor, bias_BHLL: Tensor | None = None) -> Tensor:
        """Return a tensor of shape (B, N, L, D); the bias is added to the scores of every row."""
        q_BNHLK, k_BNHLK, v_BNHLK = (
            linear(x_BNLD).unflatten(-1, (-1, self.head_width)).transpose(-3, -2)
            for linear in (self.wq, self.wk, self.wv)
        )
        scores_BNHLL = (q_BNHLK * self.head_width**-0.5) @ k_BNHLK.transpose(-2, -1)
        if bias_BHLL is not None:
            scores_BNHLL = scores_BNHLL + bias_BHLL.unsqueeze(1)
        y_BNLA = (scores_BNHLL.softmax(dim=-1) @ v_BNHLK).transpose(-3, -2).flatten(-2)
        output: Tensor = self.wo(self.gate(x_BNLD).sigmoid() * y_BNLA)
        return output


class GlobalAttention(_Projections):
    """One query a row, the mean of its tokens', on keys and values that heads share (algorithm 19)."""

    shares_keys = True

    def forward(self, x_BNLD: Tensor) -> Tensor:
        """Return a tensor of shape (B, N, L, D)."""
        q_BNHK = self.wq(x_BNLD.mean(dim=2)).unflatten(-1, (-1, self.head_width))
        scores_BNHL = (q_BNHK * self.head_width**-0.5) @ self.wk(x_BNLD).transpose(-2, -1)
        y_BN1A = (scores_BNHL.softmax(dim=-1) @ self.wv(x_BNLD)).flatten(-2).unsqueeze(2)
        output: Tensor = self.wo(self.gate(x_BNLD).sigmoid() * y_BN1A)
        return output
