"""AlphaFold's trunk: blocks that update an MSA and a pair representation, embeddings and heads.

Shapes: B batch, S sequences, R residues, I and J residues of a pair, M width of the MSA, Z width of the
pair representation.

Source: Jumper et al. 2021, doi:10.1038/s41586-021-03819-2, supplement 1.6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.models.parts.initialisation import initialise
from harness.models.parts.msa import ColumnAttention, OuterProductMean, RowAttention, Transition
from harness.models.parts.triangles import TriangleAttention, TriangleMultiplication

_BRANCHES = 6  # branches that a block adds to the pair representation; it adds three to the MSA
_FARTHEST = 32  # residues; pairs that are farther apart share one relative position


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
