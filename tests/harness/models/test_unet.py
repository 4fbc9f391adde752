from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.errors import ConfigError
from harness.models import ModelSpec
from harness.models.parts.denoiser import ResidualBlock, UNet, UNetBlockPlan
from harness.models.unet import UNetSpec

MakeSpec = Callable[..., ModelSpec]

SMALL: dict[str, Any] = {"width": 4, "head_width": 2, "n_groups": 2, "image_size": 8, "attention_sizes": []}


def spec_of(make_spec: MakeSpec, **changes: Any) -> UNetSpec:
    spec = make_spec("unet", **changes)
    assert isinstance(spec, UNetSpec)
    return spec


def block_of(plan: UNetBlockPlan) -> ResidualBlock:
    torch.manual_seed(0)
    return ResidualBlock(plan, time_width=8, n_groups=2, head_width=2, dropout=0.0).double()


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_the_plan_of_two_levels(make_spec: MakeSpec) -> None:
    spec = spec_of(make_spec, **SMALL | {"multipliers": [1, 3], "attention_sizes": [4]})
    assert list(spec.plan()) == [
        UNetBlockPlan(channels=4, out_channels=4, size=8, gives_skip=True),
        UNetBlockPlan(channels=4, out_channels=4, size=4, resampling="down", gives_skip=True),
        UNetBlockPlan(channels=4, out_channels=12, size=4, is_attending=True, gives_skip=True),
        UNetBlockPlan(channels=12, out_channels=12, size=4, is_attending=True),
        UNetBlockPlan(channels=12, out_channels=12, size=4),
        UNetBlockPlan(channels=12, out_channels=12, size=4, skip_channels=12, is_attending=True),
        UNetBlockPlan(channels=12, out_channels=12, size=4, skip_channels=4, is_attending=True),
        UNetBlockPlan(channels=12, out_channels=12, size=8, resampling="up"),
        UNetBlockPlan(channels=12, out_channels=4, size=8, skip_channels=4),
        UNetBlockPlan(channels=4, out_channels=4, size=8, skip_channels=4),
    ]


@pytest.mark.parametrize(
    ("multipliers", "n_blocks", "blocks"),
    [([1], 1, 5), ([1, 2], 1, 10), ([1, 2], 2, 14), ([1, 2, 2, 4], 1, 20), ([1, 1, 2, 2, 4, 4], 2, 42)],
)
def test_skips_are_taken_in_the_opposite_order(
    make_spec: MakeSpec, multipliers: list[int], n_blocks: int, blocks: int
) -> None:
    changes = SMALL | {"multipliers": multipliers, "n_blocks": n_blocks, "image_size": 32}
    plans = list(spec_of(make_spec, **changes).plan())
    assert len(plans) == blocks
    given = [plan.out_channels for plan in plans if plan.gives_skip]
    assert [plan.skip_channels for plan in plans if plan.skip_channels] == [*reversed(given), 4]


def test_outputs_have_the_shape_of_the_images(make_spec: MakeSpec) -> None:
    spec = spec_of(make_spec, **SMALL | {"n_blocks": 2, "image_size": 16})
    assert spec.build()(*spec.sample_batch(2, np.random.default_rng(0)).inputs).shape == (2, 3, 16, 16)


def test_a_block_is_scaled_and_shifted_by_time() -> None:
    block = block_of(UNetBlockPlan(channels=4, out_channels=6, size=8, skip_channels=2))
    x, time, skip = normal(1, 4, 8, 8), normal(1, 8), normal(1, 2, 8, 8)
    joined = torch.cat((x, skip), dim=1)
    scale, shift = block.time(functional.silu(time))[0].split(6)
    hidden = block.time_norm(block.convolution(functional.silu(block.norm(joined))))
    hidden = hidden * (1 + scale[:, None, None]) + shift[:, None, None]
    expected = block.shortcut(joined) + block.wo(functional.silu(hidden))
    assert torch.equal(block(x, time, skip), expected)


@pytest.mark.parametrize(
    ("resampling", "size", "shrunk"),
    [("down", 4, lambda x: x.unfold(2, 2, 2).unfold(3, 2, 2).mean((-2, -1))),
     ("up", 16, lambda x: x.repeat_interleave(2, 2).repeat_interleave(2, 3))],
    ids=["halved", "doubled"],
)  # fmt: skip
def test_a_block_resamples_both_branches(
    resampling: Any, size: int, shrunk: Callable[[Tensor], Tensor]
) -> None:
    block = block_of(UNetBlockPlan(channels=4, out_channels=4, size=size, resampling=resampling))
    x, time = normal(2, 4, 8, 8), normal(2, 8)
    seen: list[Tensor] = []
    block.convolution.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    nn.init.zeros_(block.wo.weight)
    nn.init.zeros_(block.wo.bias)  # type: ignore[arg-type]
    torch.testing.assert_close(block(x, time), shrunk(x))  # means are rounded elsewhere
    torch.testing.assert_close(seen[0], shrunk(functional.silu(block.norm(x))))


def test_attention_sees_every_pixel() -> None:
    block = block_of(UNetBlockPlan(channels=4, out_channels=4, size=4, is_attending=True))
    x = normal(1, 4, 4, 4).requires_grad_()
    block.attention(x)[0, :, 0, 0].sum().backward()
    assert x.grad is not None
    assert x.grad.all()


def test_time_matters_to_every_block(make_spec: MakeSpec) -> None:
    spec = spec_of(make_spec, **SMALL)
    torch.manual_seed(0)
    model = spec.build()
    images, times = spec.sample_batch(1, np.random.default_rng(0)).inputs
    assert isinstance(model, UNet)
    assert not torch.equal(model(images, times), model(images, times + 1))
    seen: list[Tensor] = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    model(images, times)
    assert len(seen) == 20
    assert all(each is seen[0] for each in seen)


def test_samples_keep_their_variance_at_every_time(make_spec: MakeSpec) -> None:
    batch = spec_of(make_spec).sample_batch(32, np.random.default_rng(0))
    noisy, times = batch.inputs
    assert (noisy.shape, noisy.dtype, times.dtype) == ((32, 3, 64, 64), torch.float32, torch.int64)
    assert 0 <= times.min() < 100
    assert 900 < times.max() < 1000
    assert ((noisy.std((1, 2, 3)) - 1).abs() < 0.05).all()
    share = (noisy * batch.targets).mean((1, 2, 3))  # of the noise: sqrt(1 - a)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)[times]
    assert ((share - (1 - kept).sqrt()).abs() < 0.05).all()


def test_the_loss_is_the_distance_from_the_noise(make_spec: MakeSpec) -> None:
    spec = spec_of(make_spec, **SMALL)
    batch = spec.sample_batch(2, np.random.default_rng(0))
    assert spec.loss(batch.targets, batch).item() == 0.0
    assert spec.loss(batch.targets + 2, batch).item() == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_groups": 5}, "model.n_groups: must divide model.width, 16, got 5"),
        ({"head_width": 5}, "model.head_width: must divide model.width, 16, got 5"),
        ({"width": 0}, "model.width: must be at least 1, got 0"),
        (
            {"width": 15, "n_groups": 5, "head_width": 5},
            "model.width: must be even, for sines and cosines, got 15",
        ),
        ({"multipliers": []}, "model.multipliers: must be numbers of at least 1, one a level, got []"),
        (
            {"multipliers": [1, 0]},
            "model.multipliers: must be numbers of at least 1, one a level, got [1, 0]",
        ),
        ({"image_size": 60}, "model.image_size: must be a multiple of 8 for 4 levels, got 60"),
        (
            {"attention_sizes": [12]},
            "model.attention_sizes: must be among the levels' sizes, [64, 32, 16, 8], got 12",
        ),
    ],
)
def test_shapes_that_are_refused(make_spec: MakeSpec, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        make_spec("unet", **changes)
    assert str(refusal.value) == message
