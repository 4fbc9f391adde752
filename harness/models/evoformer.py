"""AlphaFold's trunk: an MSA and a pair representation that update each other, block by block.

Shapes: B batch, S sequences, R residues, I and J residues of a pair, M width of the MSA, Z width of the
pair representation.

Source: Jumper et al. 2021, doi:10.1038/s41586-021-03819-2, supplement 1.6 (block), 1.9.8 and 1.9.9 (losses).
Block widths as in Cheng et al. 2022, arXiv:2203.00854 (FastFold).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from harness.errors import require_at_least
from harness.models.base import Batch, ModelSpec
from harness.models.parts import protein_trunk

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor, nn

_MASKED_FRACTION = 0.15
_UNMASKED = -100  # cross entropy leaves these targets out
_DISTOGRAM_WEIGHT, _MSA_WEIGHT = 0.3, 2.0
_BOND_LENGTH = 3.8  # angstrom, between neighbouring residues
_NEAREST, _FARTHEST_DISTANCE = 2.0, 22.0  # angstrom: where the first bin ends and the last begins


@dataclass(frozen=True, kw_only=True, slots=True)
class EvoformerSpec(ModelSpec):
    """An Evoformer of any size that restores masked residues and predicts distances, on random proteins.

    Fields:
        n_layers: blocks, >= 1.
        msa_width: width M.
        msa_heads: heads of the attention along rows and columns.
        msa_head_width: width of one such head.
        pair_width: width Z.
        pair_heads: heads of the triangle attention.
        pair_head_width: width of one such head.
        outer_width: width C of the vectors whose outer product is averaged over sequences.
        triangle_width: hidden width T of the triangle multiplication.
        transition_factor: hidden width of the transitions over M and over Z.
        global_columns: True where columns attend with one query each, as in the extra MSA stack.
        n_sequences: rows S of the MSA, >= 1.
        n_residues: columns R of the MSA, >= 1.
        n_tokens: kinds of residues, >= 2; the last is the mask.
        n_bins: bins of the distogram, >= 2.
    """

    repeats_one_block: ClassVar[bool] = True
    scales_with_batch: ClassVar[bool] = True

    n_layers: int
    msa_width: int
    msa_heads: int
    msa_head_width: int
    pair_width: int
    pair_heads: int
    pair_head_width: int
    outer_width: int
    triangle_width: int
    transition_factor: int
    global_columns: bool
    n_sequences: int
    n_residues: int
    n_tokens: int
    n_bins: int

    def __post_init__(self) -> None:
        require_at_least("model.n_tokens", self.n_tokens, 2)
        require_at_least("model.n_bins", self.n_bins, 2)
        ModelSpec.__post_init__(self)

    def build(self) -> nn.Module:
        """Return an `Evoformer`."""
        msa = {"width": self.msa_width, "n_heads": self.msa_heads, "head_width": self.msa_head_width}
        pair = {"width": self.pair_width, "n_heads": self.pair_heads, "head_width": self.pair_head_width}
        block = partial(
            protein_trunk.EvoformerBlock,
            msa=msa,
            pair=pair,
            outer_width=self.outer_width,
            triangle_width=self.triangle_width,
            transition_factor=self.transition_factor,
            is_global=self.global_columns,
            dropout=self.dropout,
        )
        return protein_trunk.Evoformer(
            n_layers=self.n_layers,
            block=block,
            n_tokens=self.n_tokens,
            n_bins=self.n_bins,
            msa_width=self.msa_width,
            pair_width=self.pair_width,
        )

    def sample_batch(self, batch_size: int, random: np.random.Generator) -> Batch:
        """Return MSAs with masked residues, int64 of shape (B, S, R), and a pair of targets.

        The first are the residues under the masks, int64 of shape (B, S, R), 15 % of every MSA; the second
        the bins of the distances along a random walk, int64 of shape (B, R, R).
        """
        shape = (batch_size, self.n_sequences, self.n_residues)
        residues_BSR = random.integers(self.n_tokens - 1, size=shape)
        n_masked = max(1, round(_MASKED_FRACTION * self.n_sequences * self.n_residues))
        order = random.random((batch_size, self.n_sequences * self.n_residues)).argsort(axis=1)
        is_masked_BSR = (order < n_masked).reshape(shape)
        msa_BSR = np.where(is_masked_BSR, self.n_tokens - 1, residues_BSR)
        hidden_BSR = np.where(is_masked_BSR, residues_BSR, _UNMASKED)
        bins_BIJ = self._distance_bins(batch_size, random)
        return Batch(
            inputs=(torch.from_numpy(msa_BSR),),
            targets=(torch.from_numpy(hidden_BSR), torch.from_numpy(bins_BIJ)),
        )

    def _distance_bins(self, batch_size: int, random: np.random.Generator) -> NDArray[np.int64]:
        steps_BR3 = random.standard_normal((batch_size, self.n_residues, 3))
        steps_BR3 *= _BOND_LENGTH / np.linalg.norm(steps_BR3, axis=-1, keepdims=True)
        places_BR3 = steps_BR3.cumsum(axis=1)
        distances_BIJ = np.linalg.norm(places_BR3[:, :, None] - places_BR3[:, None], axis=-1)
        edges = np.linspace(_NEAREST, _FARTHEST_DISTANCE, self.n_bins - 1)
        bins_BIJ: NDArray[np.int64] = np.digitize(distances_BIJ, edges)
        return bins_BIJ

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return twice the cross entropy of masked residues plus 0.3 times that of distances (equation 7).

        Args:
            outputs: logits of residues of shape (B, S, R, tokens) and of distances of shape (B, R, R, bins).
        """
        losses = (
            torch.nn.functional.cross_entropy(
                logits.flatten(0, -2).float(), targets.flatten(), ignore_index=_UNMASKED
            )
            for logits, targets in zip(outputs, batch.targets, strict=True)
        )
        msa_loss, distogram_loss = losses
        return _MSA_WEIGHT * msa_loss + _DISTOGRAM_WEIGHT * distogram_loss

    def flops_per_sample(self, sequence_length: int) -> int:  # noqa: ARG002 (an MSA has its own size)
        """Return the sum over all modules, of order S·R² and S²·R in the MSA and R³ in the triangles."""
        cells, pairs = self.n_sequences * self.n_residues, self.n_residues**2
        heads = 2 * cells * self.msa_width * self.n_tokens + 2 * pairs * self.pair_width * self.n_bins
        return self.n_layers * (self._msa_flops(cells) + self._pair_flops(cells, pairs)) + heads

    def _msa_flops(self, cells: int) -> int:
        """Return the FLOPs of a block's row attention, column attention and MSA transition."""
        width, inner = self.msa_width, self.msa_heads * self.msa_head_width
        projections = 10 * cells * width * inner
        bias = 2 * self.n_residues**2 * self.pair_width * self.msa_heads
        rows = projections + bias + 4 * cells * self.n_residues * inner
        columns = projections + 4 * cells * self.n_sequences * inner
        if self.global_columns:
            queries = 2 * self.n_residues * width * inner
            columns = queries + 4 * cells * width * (self.msa_head_width + inner) + 4 * cells * inner
        return rows + columns + 4 * cells * self.transition_factor * width**2

    def _pair_flops(self, cells: int, pairs: int) -> int:
        """Return the FLOPs of a block's outer product, triangles and pair transition."""
        width, inner = self.pair_width, self.pair_heads * self.pair_head_width
        outer = 4 * cells * self.msa_width * self.outer_width
        outer += 2 * pairs * self.outer_width**2 * (self.n_sequences + width)
        products = pairs * (10 * width * self.triangle_width + 2 * width**2)
        products += 2 * pairs * self.n_residues * self.triangle_width
        attention = pairs * (10 * width * inner + 2 * width * self.pair_heads)
        attention += 4 * pairs * self.n_residues * inner
        return outer + 2 * products + 2 * attention + 4 * pairs * self.transition_factor * width**2
