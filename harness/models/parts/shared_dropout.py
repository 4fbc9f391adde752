"""Dropout whose mask is shared along a dimension."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


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
