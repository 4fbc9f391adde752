"""The UNet of a diffusion model, and its residual block.

Shapes: B batch, C channels, Y rows, X columns, T = Y·X pixels, E width of the time embedding.

Source: Dhariwal and Nichol 2021, arXiv:2105.05233, section 3 and 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.models.parts.attention import SelfAttention
from harness.models.parts.initialisation import initialise

_CHANNELS = 3
_LONGEST_PERIOD = 10_000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class UNetBlockPlan:
    """The work of one residual block.

    Fields:
        channels: channels of the input.
        skip_channels: channels of the skip that is concatenated to the input; 0 for none.
        out_channels: channels of the output.
        size: rows and columns of the output.
        resampling: change of resolution of features and shortcut, before the first convolution.
        is_attending: True where pixels attend to each other after the convolutions.
        gives_skip: True where a block on the way up reads the output.
    """

    channels: int
    out_channels: int
    size: int
    skip_channels: int = 0
    resampling: Literal["none", "down", "up"] = "none"
    is_attending: bool = False
    gives_skip: bool = False

    @property
    def in_channels(self) -> int:
        """Channels of input and skip together."""
        return self.channels + self.skip_channels

    def flops(self, time_width: int) -> int:
        """Return 18·(C·C' + C'²) a pixel, those of shortcut and attention if any, and 4·E·C' for the time."""
        pixels, width = self.size**2, self.out_channels
        convolutions = 18 * (self.in_channels + width) * width
        shortcut = 2 * self.in_channels * width if self.in_channels != width else 0
        attention = 8 * width**2 + 4 * pixels * width if self.is_attending else 0
        return pixels * (convolutions + shortcut + attention) + 4 * time_width * width


class ResidualBlock(nn.Module):
    """Two convolutions behind norms, the second norm scaled and shifted by time; then attention, or not."""

    def __init__(
        self, plan: UNetBlockPlan, *, time_width: int, n_groups: int, head_width: int, dropout: float
    ) -> None:
        super().__init__()
        width = plan.out_channels
        self.resampling = plan.resampling
        self.norm = nn.GroupNorm(n_groups, plan.in_channels)
        self.convolution = nn.Conv2d(plan.in_channels, width, 3, padding=1)
        self.time = nn.Linear(time_width, 2 * width)
        self.time_norm = nn.GroupNorm(n_groups, width)
        self.dropout = nn.Dropout(dropout)
        self.wo = nn.Conv2d(width, width, 3, padding=1)
        self.shortcut = nn.Identity() if plan.in_channels == width else nn.Conv2d(plan.in_channels, width, 1)
        self.attention = (
            PixelAttention(width=width, n_groups=n_groups, head_width=head_width, dropout=dropout)
            if plan.is_attending
            else nn.Identity()
        )

    def forward(self, x_BCYX: Tensor, time_BE: Tensor, skip_BCYX: Tensor | None = None) -> Tensor:
        """Return a tensor of shape (B, out channels, size, size)."""
        if skip_BCYX is not None:
            x_BCYX = torch.cat((x_BCYX, skip_BCYX), dim=1)
        h_BCYX = self.convolution(self._resample(functional.silu(self.norm(x_BCYX))))
        scale_BC11, shift_BC11 = self.time(functional.silu(time_BE))[:, :, None, None].chunk(2, dim=1)
        h_BCYX = functional.silu(self.time_norm(h_BCYX) * (1 + scale_BC11) + shift_BC11)
        h_BCYX = self.shortcut(self._resample(x_BCYX)) + self.wo(self.dropout(h_BCYX))
        output: Tensor = self.attention(h_BCYX)
        return output

    def _resample(self, x_BCYX: Tensor) -> Tensor:
        if self.resampling == "down":
            return functional.avg_pool2d(x_BCYX, 2)
        if self.resampling == "up":
            return functional.interpolate(x_BCYX, scale_factor=2.0, mode="nearest")
        return x_BCYX


class PixelAttention(nn.Module):
    """Attention among all pixels behind a norm, added to its input."""

    def __init__(self, *, width: int, n_groups: int, head_width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(n_groups, width)
        self.attention = SelfAttention(width=width, n_heads=width // head_width, dropout=dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BCYX: Tensor) -> Tensor:
        """Return a tensor of shape (B, C, Y, X)."""
        y_BTC = self.attention(self.norm(x_BCYX).flatten(2).transpose(1, 2))
        output: Tensor = x_BCYX + self.dropout(y_BTC).transpose(1, 2).unflatten(2, x_BCYX.shape[2:])
        return output


class UNet(nn.Module):
    """The noise in images at given times.

    Args:
        plans: what every block does, in the order of calls.
        width: channels of the first level.
        time_width: width E of the time embedding.
        n_groups: groups of channels in a norm.
        head_width: channels of an attention head.
        dropout: probability inside of every block.
    """

    def __init__(
        self,
        plans: Sequence[UNetBlockPlan],
        *,
        width: int,
        time_width: int,
        n_groups: int,
        head_width: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.plans = plans
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, time_width), nn.SiLU(), nn.Linear(time_width, time_width))
        self.stem = nn.Conv2d(_CHANNELS, width, 3, padding=1)
        self.layers = nn.ModuleList(
            ResidualBlock(
                plan, time_width=time_width, n_groups=n_groups, head_width=head_width, dropout=dropout
            )
            for plan in plans
        )
        self.norm = nn.GroupNorm(n_groups, plans[-1].out_channels)
        self.head = nn.Conv2d(plans[-1].out_channels, _CHANNELS, 3, padding=1)
        initialise(self, n_layers=len(self.layers), by_fan_in=True)

    def forward(self, images_BCYX: Tensor, times_B: Tensor) -> Tensor:
        """Return a tensor of the shape of the images."""
        dtype = self.stem.weight.dtype
        exponent = torch.arange(0, self.width, 2, dtype=torch.float32, device=times_B.device) / self.width
        angles = times_B.unsqueeze(1) * _LONGEST_PERIOD**-exponent
        time_BE = self.time(torch.cat((angles.cos(), angles.sin()), dim=1).to(dtype))
        x_BCYX = self.stem(images_BCYX.to(dtype))
        skips = [x_BCYX]
        for layer, plan in zip(self.layers, self.plans, strict=True):
            x_BCYX = layer(x_BCYX, time_BE, skips.pop()) if plan.skip_channels else layer(x_BCYX, time_BE)
            if plan.gives_skip:
                skips.append(x_BCYX)
        noise_BCYX: Tensor = self.head(functional.silu(self.norm(x_BCYX)))
        return noise_BCYX
