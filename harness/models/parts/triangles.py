"""Updates of the pair representation along triangles of residues.

Shapes: B batch, I and J residues of a pair, Z pair width, T hidden width, H heads.

Source: Jumper et al. 2021, doi:10.1038/s41586-021-03819-2, supplement 1.6.5 and 1.6.6.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from harness.models.parts.gated_attention import GatedAttention

_OUTGOING = "bikt,bjkt->bijt"
_INCOMING = "bkit,bkjt->bijt"


class TriangleMultiplication(nn.Module):
    """An edge ij from the products of the edges ik and jk, or ki and kj (algorithms 11 and 12)."""

    def __init__(self, *, width: int, hidden_width: int, is_incoming: bool) -> None:
        super().__init__()
        self.edges = _INCOMING if is_incoming else _OUTGOING
        self.norm = nn.LayerNorm(width)
        self.left = nn.Linear(width, hidden_width)
        self.left_gate = nn.Linear(width, hidden_width)
        self.right = nn.Linear(width, hidden_width)
        self.right_gate = nn.Linear(width, hidden_width)
        self.product_norm = nn.LayerNorm(hidden_width)
        self.gate = nn.Linear(width, width)
        self.wo = nn.Linear(hidden_width, width)

    def forward(self, pair_BIJZ: Tensor) -> Tensor:
        """Return a tensor of shape (B, I, J, Z)."""
        z_BIJZ = self.norm(pair_BIJZ)
        left_BIJT = self.left_gate(z_BIJZ).sigmoid() * self.left(z_BIJZ)
        right_BIJT = self.right_gate(z_BIJZ).sigmoid() * self.right(z_BIJZ)
        product_BIJT = torch.einsum(self.edges, left_BIJT, right_BIJT)
        output: Tensor = self.gate(z_BIJZ).sigmoid() * self.wo(self.product_norm(product_BIJT))
        return output


class TriangleAttention(nn.Module):
    """Attention among the edges that start, or end, at one residue (algorithms 13 and 14)."""

    def __init__(self, *, width: int, n_heads: int, head_width: int, is_ending: bool) -> None:
        super().__init__()
        self.is_ending = is_ending
        self.norm = nn.LayerNorm(width)
        self.bias = nn.Linear(width, n_heads, bias=False)
        self.attention = GatedAttention(width=width, n_heads=n_heads, head_width=head_width)

    def forward(self, pair_BIJZ: Tensor) -> Tensor:
        """Return a tensor of shape (B, I, J, Z)."""
        # edges that end at j are those that start at j in the transposed pair, bias included
        z_BIJZ = self.norm(pair_BIJZ.transpose(1, 2) if self.is_ending else pair_BIJZ)
        bias_BHIJ = self.bias(z_BIJZ).permute(0, 3, 1, 2)
        y_BIJZ: Tensor = self.attention(z_BIJZ, bias_BHIJ)
        return y_BIJZ.transpose(1, 2) if self.is_ending else y_BIJZ
