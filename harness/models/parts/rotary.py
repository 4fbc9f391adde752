"""Rotary positions.

Shapes: B batch, S sequence, H heads, K head width, R = K / 2.

Source: Su et al. 2021, arXiv:2104.09864.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
