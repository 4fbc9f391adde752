"""The UNet of a diffusion model.

Shapes: B batch, C channels, Y rows, X columns, E width of the time embedding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.models.parts.initialisation import initialise
from harness.models.parts.unet_block import ResidualBlock, UNetBlockPlan

_CHANNELS = 3
_LONGEST_PERIOD = 10_000.0


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
