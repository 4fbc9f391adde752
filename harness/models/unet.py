"""A diffusion model's UNet: residual blocks down and up a ladder of resolutions, with skips between.

Shapes: B batch, Y rows, X columns.

`layers` holds every residual block in the order of calls: down, middle, up. Resampling, attention and the
concatenation of a skip are parts of a block. So one container holds everything that grows with the image,
except stem and head, and a region around a block reads features, time and skips.

Source: Ho et al. 2020, arXiv:2006.11239, section 3.2 to 4 and appendix B (UNet, loss); Dhariwal and Nichol
2021, arXiv:2105.05233, section 3 (resampling inside of residual blocks, adaptive group norm).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from harness.errors import ConfigError
from harness.models.base import Batch, ModelSpec, require_divides
from harness.models.parts import denoiser

if TYPE_CHECKING:
    from torch import Tensor, nn

_CHANNELS = 3
_N_TIMES = 1000
_FIRST_VARIANCE, _LAST_VARIANCE = 1e-4, 0.02  # of the noise that a time step adds, linear in between
_TIME_FACTOR = 4  # width E of the time embedding over that of the first level


@dataclass(frozen=True, kw_only=True, slots=True)
class UNetSpec(ModelSpec):
    """A UNet of any size that predicts the noise in random images.

    Fields:
        width: channels of the first level, a multiple of `n_groups` and of `head_width`.
        multipliers: channels of each level over `width`; each level halves rows and columns.
        n_blocks: residual blocks of a level on the way down, >= 1; one more on the way up.
        attention_sizes: rows of the levels whose blocks attend; the middle always does.
        head_width: channels of an attention head, >= 1.
        n_groups: groups of channels in a norm, >= 1.
        image_size: rows and columns of an image, a multiple of 2 to the number of levels less one.
    """

    width: int
    multipliers: tuple[int, ...]
    n_blocks: int
    attention_sizes: tuple[int, ...]
    head_width: int
    n_groups: int
    image_size: int

    def __post_init__(self) -> None:
        """Refuse sizes that do not divide, and levels that the image does not have."""
        ModelSpec.__post_init__(self)
        require_divides("head_width", self.head_width, "width", self.width)
        require_divides("n_groups", self.n_groups, "width", self.width)
        if self.width % 2:
            raise ConfigError("model.width", f"must be even, for sines and cosines, got {self.width}")
        if not self.multipliers or min(self.multipliers) < 1:
            problem = f"must be numbers of at least 1, one a level, got {list(self.multipliers)}"
            raise ConfigError("model.multipliers", problem)
        sizes = [self.image_size >> level for level in range(len(self.multipliers))]
        if self.image_size % 2 ** (len(sizes) - 1):
            problem = f"must be a multiple of {2 ** (len(sizes) - 1)} for {len(sizes)} levels"
            raise ConfigError("model.image_size", f"{problem}, got {self.image_size}")
        for size in self.attention_sizes:
            if size not in sizes:
                problem = f"must be among the levels' sizes, {sizes}, got {size}"
                raise ConfigError("model.attention_sizes", problem)

    def build(self) -> nn.Module:
        """Return a `UNet`."""
        return denoiser.UNet(
            tuple(self.plan()),
            width=self.width,
            time_width=_TIME_FACTOR * self.width,
            n_groups=self.n_groups,
            head_width=self.head_width,
            dropout=self.dropout,
        )

    def sample_batch(self, batch_size: int, random: np.random.Generator) -> Batch:
        """Return noisy images, float32 of shape (B, 3, Y, X), times, int64 of shape (B,), and the noise.

        An image at time t is sqrt(a)·x + sqrt(1 - a)·noise with a the product of 1 - variance up to t.
        """
        shape = (batch_size, _CHANNELS, self.image_size, self.image_size)
        images, noise = (random.standard_normal(shape, dtype=np.float32) for _ in range(2))
        times_B = random.integers(_N_TIMES, size=batch_size)
        kept = np.cumprod(1 - np.linspace(_FIRST_VARIANCE, _LAST_VARIANCE, _N_TIMES))[times_B]
        kept_B111 = kept.astype(np.float32).reshape(-1, 1, 1, 1)
        noisy = np.sqrt(kept_B111) * images + np.sqrt(1 - kept_B111) * noise
        return Batch(
            inputs=(torch.from_numpy(noisy), torch.from_numpy(times_B)), targets=torch.from_numpy(noise)
        )

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the mean squared error of `outputs`, the noise, of shape (B, 3, Y, X), in float32."""
        return torch.nn.functional.mse_loss(outputs.float(), batch.targets)

    def flops_per_sample(self, sequence_length: int) -> int:  # noqa: ARG002 (an image has its own size)
        """Return the sum over all blocks; 18·C·C' a pixel in a convolution of 3 x 3."""
        time_width = _TIME_FACTOR * self.width
        time = 2 * time_width * (self.width + time_width)
        ends = 2 * 18 * _CHANNELS * self.width * self.image_size**2
        return time + ends + sum(plan.flops(time_width) for plan in self.plan())

    def plan(self) -> Iterator[denoiser.UNetBlockPlan]:
        """Yield what every block does, in the order of calls: down, middle, up."""
        levels, channels, skips = range(len(self.multipliers)), self.width, [self.width]
        for level in levels:
            for _ in range(self.n_blocks):
                yield self._block(level, channels, gives_skip=True)
                channels = self._channels(level)
                skips.append(channels)
            if level != levels[-1]:
                yield self._resampler(level + 1, channels, "down")
                skips.append(channels)
        yield replace(self._block(levels[-1], channels), is_attending=True)
        yield replace(self._block(levels[-1], channels), is_attending=False)
        for level in reversed(levels):
            for _ in range(self.n_blocks + 1):
                yield self._block(level, channels, skip_channels=skips.pop())
                channels = self._channels(level)
            if level:
                yield self._resampler(level - 1, channels, "up")

    def _channels(self, level: int) -> int:
        return self.width * self.multipliers[level]

    def _block(
        self, level: int, channels: int, *, skip_channels: int = 0, gives_skip: bool = False
    ) -> denoiser.UNetBlockPlan:
        """Return the plan of a residual block on a level."""
        size = self.image_size >> level
        return denoiser.UNetBlockPlan(
            channels=channels,
            out_channels=self._channels(level),
            size=size,
            skip_channels=skip_channels,
            is_attending=size in self.attention_sizes,
            gives_skip=gives_skip,
        )

    def _resampler(
        self, to_level: int, channels: int, resampling: Literal["down", "up"]
    ) -> denoiser.UNetBlockPlan:
        """Return the plan of a block that changes the level."""
        return denoiser.UNetBlockPlan(
            channels=channels,
            out_channels=channels,
            size=self.image_size >> to_level,
            resampling=resampling,
            gives_skip=resampling == "down",
        )
