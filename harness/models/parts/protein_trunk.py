"""AlphaFold's trunk: blocks that update an MSA and a pair representation, embeddings and heads.

Shapes: B batch, S sequences, R residues, I and J residues of a pair, M width of the MSA, Z width of the
pair representation, T hidden width of triangles, H heads, C outer width. In attention: N independent rows,
L tokens of a row, D width, K head width, A = H·K.

Source: Jumper et al. 2021, doi:10.1038/s41586-021-03819-2, supplement 1.6 and 1.7.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.models.parts.initialisation import initialise

_BRANCHES = 6  # branches that a block adds to the pair representation; it adds three to the MSA
_FARTHEST = 32  # residues; pairs that are farther apart share one relative position
_OUTGOING = "bikt,bjkt->bijt"
_INCOMING = "bkit,bkjt->bijt"


class Evoformer(nn.Module):
    """Logits of masked residues, and of the distances between residues."""

    def __init__(
        self,
        *,
        n_layers: int,
        block: Callable[[], nn.Module],
        n_tokens: int,
        n_bins: int,
        msa_width: int,
        pair_width: int,
    ) -> None:
        super().__init__()
        self.msa_embedding = nn.Embedding(n_tokens, msa_width)
        self.query_embedding = nn.Embedding(n_tokens, msa_width)
        self.left_embedding = nn.Embedding(n_tokens, pair_width)
        self.right_embedding = nn.Embedding(n_tokens, pair_width)
        self.position = nn.Embedding(2 * _FARTHEST + 1, pair_width)
        self.layers = nn.ModuleList(block() for _ in range(n_layers))
        self.msa_head = nn.Linear(msa_width, n_tokens)
        self.distogram_head = nn.Linear(pair_width, n_bins)
        initialise(self, n_layers=n_layers * _BRANCHES // 2, by_fan_in=True)

    def forward(self, tokens_BSR: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits of shapes (B, S, R, tokens) and (B, R, R, bins), the latter symmetric in residues."""
        msa_BSRM, pair_BIJZ = self.embed(tokens_BSR)
        for layer in self.layers:
            msa_BSRM, pair_BIJZ = layer(msa_BSRM, pair_BIJZ)
        return self.msa_head(msa_BSRM), self.distogram_head(pair_BIJZ + pair_BIJZ.transpose(1, 2))

    def embed(self, tokens_BSR: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first MSA and pair representation; the first sequence is the query."""
        query_BR = tokens_BSR[:, 0]
        msa_BSRM = self.msa_embedding(tokens_BSR) + self.query_embedding(query_BR).unsqueeze(1)
        residue_R = torch.arange(tokens_BSR.size(2), device=tokens_BSR.device)
        offset_IJ = (residue_R.unsqueeze(1) - residue_R).clamp(-_FARTHEST, _FARTHEST) + _FARTHEST
        left_BI1Z = self.left_embedding(query_BR).unsqueeze(2)
        right_B1JZ = self.right_embedding(query_BR).unsqueeze(1)
        return msa_BSRM, left_BI1Z + right_B1JZ + self.position(offset_IJ)


class EvoformerBlock(nn.Module):
    """Rows, columns and transition of the MSA; then the pair from it and along triangles (algorithm 6).

    With global columns the block of the extra MSA stack (algorithm 18).

    Args:
        msa, pair: `width`, `n_heads` and `head_width` of the attention in either representation.
        outer_width: width of the vectors whose outer product is averaged over sequences.
        triangle_width: hidden width of the triangle multiplication.
        transition_factor: hidden width of the transitions over their width.
        is_global: True where columns attend with one query each.
        dropout: probability of the dropouts that rows or columns share.
    """

    def __init__(
        self,
        *,
        msa: Mapping[str, int],
        pair: Mapping[str, int],
        outer_width: int,
        triangle_width: int,
        transition_factor: int,
        is_global: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        msa_width, pair_width = msa["width"], pair["width"]
        edges = {"width": pair_width, "hidden_width": triangle_width}
        self.row_attention = RowAttention(pair_width=pair_width, **msa)
        self.column_attention = ColumnAttention(is_global=is_global, **msa)
        self.msa_transition = Transition(width=msa_width, hidden_width=transition_factor * msa_width)
        self.outer_product_mean = OuterProductMean(
            width=msa_width, outer_width=outer_width, pair_width=pair_width
        )
        self.outgoing_product = TriangleMultiplication(is_incoming=False, **edges)
        self.incoming_product = TriangleMultiplication(is_incoming=True, **edges)
        self.starting_attention = TriangleAttention(is_ending=False, **pair)
        self.ending_attention = TriangleAttention(is_ending=True, **pair)
        self.pair_transition = Transition(width=pair_width, hidden_width=transition_factor * pair_width)
        self.row_dropout = SharedDropout(dropout, dim=1)
        self.column_dropout = SharedDropout(dropout, dim=2)

    def forward(self, msa_BSRM: Tensor, pair_BIJZ: Tensor) -> tuple[Tensor, Tensor]:
        """Return tensors of shapes (B, S, R, M) and (B, I, J, Z)."""
        msa_BSRM = msa_BSRM + self.row_dropout(self.row_attention(msa_BSRM, pair_BIJZ))
        msa_BSRM = msa_BSRM + self.column_attention(msa_BSRM)
        msa_BSRM = msa_BSRM + self.msa_transition(msa_BSRM)
        pair_BIJZ = pair_BIJZ + self.outer_product_mean(msa_BSRM)
        pair_BIJZ = pair_BIJZ + self.row_dropout(self.outgoing_product(pair_BIJZ))
        pair_BIJZ = pair_BIJZ + self.row_dropout(self.incoming_product(pair_BIJZ))
        pair_BIJZ = pair_BIJZ + self.row_dropout(self.starting_attention(pair_BIJZ))
        pair_BIJZ = pair_BIJZ + self.column_dropout(self.ending_attention(pair_BIJZ))
        return msa_BSRM, pair_BIJZ + self.pair_transition(pair_BIJZ)


class SharedDropout(nn.Module):
    """Drop the same elements everywhere along one dimension.

    Source: Jumper et al. 2021, doi:10.1038/s41586-021-03819-2, supplement 1.11.6.
    """

    def __init__(self, probability: float, *, dim: int) -> None:
        super().__init__()
        self.probability = probability
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` with elements dropped and the others scaled up, in training; otherwise `x`."""
        if self.probability == 0 or not self.training:
            return x
        ones = x.new_ones([1 if dim == self.dim else size for dim, size in enumerate(x.shape)])
        return x * functional.dropout(ones, self.probability)


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
