"""The modules of an Evoformer block: they update an MSA, a pair representation, or the one by the other.

Shapes: B batch, S sequences, R residues, I and J residues of a pair, M width of the MSA, Z width of the
pair representation, H heads, C outer width, F hidden width.

Source: Jumper et al. 2021, doi:10.1038/s41586-021-03819-2, supplement 1.6.1 to 1.6.4 and 1.7.2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.models.parts.gated_attention import GatedAttention, GlobalAttention


class RowAttention(nn.Module):
    """Attention among the residues of each sequence, biased by their pairs (algorithm 7)."""

    def __init__(self, *, width: int, pair_width: int, n_heads: int, head_width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.pair_norm = nn.LayerNorm(pair_width)
        self.bias = nn.Linear(pair_width, n_heads, bias=False)
        self.attention = GatedAttention(width=width, n_heads=n_heads, head_width=head_width)

    def forward(self, msa_BSRM: Tensor, pair_BIJZ: Tensor) -> Tensor:
        """Return a tensor of shape (B, S, R, M)."""
        bias_BHIJ = self.bias(self.pair_norm(pair_BIJZ)).permute(0, 3, 1, 2)
        output: Tensor = self.attention(self.norm(msa_BSRM), bias_BHIJ)
        return output


class ColumnAttention(nn.Module):
    """Attention among the sequences at each residue (algorithm 8), global in the extra MSA stack (19)."""

    def __init__(self, *, width: int, n_heads: int, head_width: int, is_global: bool) -> None:
        super().__init__()
        kind = GlobalAttention if is_global else GatedAttention
        self.norm = nn.LayerNorm(width)
        self.attention = kind(width=width, n_heads=n_heads, head_width=head_width)

    def forward(self, msa_BSRM: Tensor) -> Tensor:
        """Return a tensor of shape (B, S, R, M)."""
        output: Tensor = self.attention(self.norm(msa_BSRM).transpose(1, 2)).transpose(1, 2)
        return output


class OuterProductMean(nn.Module):
    """A pair from the outer product of its residues' vectors, averaged over sequences (algorithm 10)."""

    def __init__(self, *, width: int, outer_width: int, pair_width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.left = nn.Linear(width, outer_width)
        self.right = nn.Linear(width, outer_width)
        self.wo = nn.Linear(outer_width**2, pair_width)

    def forward(self, msa_BSRM: Tensor) -> Tensor:
        """Return a tensor of shape (B, I, J, Z)."""
        x_BSRM = self.norm(msa_BSRM)
        left_BSIC = self.left(x_BSRM) / msa_BSRM.size(1)
        outer_BIJCC = torch.einsum("bsic,bsjd->bijcd", left_BSIC, self.right(x_BSRM))
        output: Tensor = self.wo(outer_BIJCC.flatten(-2))
        return output


class Transition(nn.Module):
    """`down(relu(up(norm(x))))` (algorithms 9 and 15)."""

    def __init__(self, *, width: int, hidden_width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden_width)
        self.down = nn.Linear(hidden_width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        output: Tensor = self.down(functional.relu(self.up(self.norm(x))))
        return output
