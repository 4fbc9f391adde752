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
from harness.models.parts.image_classifier import ViT, ViTBlock
from harness.models.vit import ViTSpec

MakeSpec = Callable[..., ModelSpec]


def spec_of(make_spec: MakeSpec, **changes: Any) -> ViTSpec:
    spec = make_spec("vit_nano", **changes)
    assert isinstance(spec, ViTSpec)
    return spec


def built(spec: ViTSpec) -> ViT:
    torch.manual_seed(0)
    model = spec.build().double().eval()
    assert isinstance(model, ViT)
    return model


def torchs_block(block: ViTBlock, spec: ViTSpec) -> nn.Module:
    """Return torch's own pre-norm encoder layer with the weights of `block`."""
    layer = nn.TransformerEncoderLayer(
        spec.width, spec.n_heads, spec.hidden_width, 0.0, functional.gelu, 1e-6, True, norm_first=True
    ).double()
    projections = [block.get_submodule(f"attention.{name}") for name in ("wq", "wk", "wv")]
    pairs = {
        layer.self_attn.out_proj: block.get_submodule("attention.wo"),
        layer.norm1: block.attention_norm,
        layer.norm2: block.feed_forward_norm,
        layer.linear1: block.get_submodule("feed_forward.up"),
        layer.linear2: block.get_submodule("feed_forward.down"),
    }
    for target, source in pairs.items():
        target.load_state_dict(source.state_dict())
    with torch.no_grad():
        layer.self_attn.in_proj_weight.copy_(
            torch.cat([linear.get_parameter("weight") for linear in projections])
        )
        layer.self_attn.in_proj_bias.copy_(
            torch.cat([linear.get_parameter("bias") for linear in projections])
        )
    return layer


def test_a_block_is_torchs_encoder_layer(make_spec: MakeSpec) -> None:
    spec = spec_of(make_spec)
    block = built(spec).layers[0]
    assert isinstance(block, ViTBlock)
    x_BTD = torch.randn(2, 5, 128, dtype=torch.float64)
    torch.testing.assert_close(block(x_BTD), torchs_block(block, spec)(x_BTD))  # other kernels


def test_tokens_are_the_class_and_linear_patches_with_their_positions(make_spec: MakeSpec) -> None:
    model = built(spec_of(make_spec))
    assert model.patches is not None
    nn.init.normal_(model.class_token)
    seen: list[Tensor] = []
    model.layers[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    images_BCYX = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    model(images_BCYX)
    pixels_BPN = functional.unfold(images_BCYX, 4, stride=4)
    patches_BND = functional.linear(
        pixels_BPN.transpose(1, 2), model.patches.weight.flatten(1), model.patches.bias
    )
    tokens_BTD = torch.cat((model.class_token.expand(2, 1, 128), patches_BND), dim=1)
    torch.testing.assert_close(seen[0], tokens_BTD + model.position.weight)  # other kernels


def test_every_patch_counts(make_spec: MakeSpec) -> None:
    model = built(spec_of(make_spec))
    images_BCYX = torch.randn(1, 3, 32, 32, dtype=torch.float64, requires_grad=True)
    model(images_BCYX).sum().backward()
    assert images_BCYX.grad is not None
    assert images_BCYX.grad.all()


def test_samples_are_images_and_their_classes(make_spec: MakeSpec) -> None:
    batch = spec_of(make_spec).sample_batch(64, np.random.default_rng(0))
    (images_BCYX,) = batch.inputs
    assert (images_BCYX.shape, images_BCYX.dtype) == ((64, 3, 32, 32), torch.float32)
    assert (batch.targets.shape, batch.targets.dtype) == ((64,), torch.int64)
    assert set(batch.targets.tolist()) == set(range(10))


def test_the_loss_is_that_of_the_classes(make_spec: MakeSpec) -> None:
    spec = spec_of(make_spec)
    batch = spec.sample_batch(4, np.random.default_rng(0))
    certain = 1e4 * functional.one_hot(batch.targets, 10)
    assert spec.loss(certain, batch).item() == 0.0
    assert spec.loss(torch.zeros(4, 10), batch).item() == pytest.approx(np.log(10))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_size": 5}, "model.patch_size: must divide model.image_size, 32, got 5"),
        ({"n_heads": 3}, "model.n_heads: must divide model.width, 128, got 3"),
        ({"n_classes": 0}, "model.n_classes: must be at least 1, got 0"),
        ({"image_size": 0}, "model.image_size: must be at least 1, got 0"),
        ({"dropout": 1.0}, "model.dropout: must be in [0, 1), got 1.0"),
    ],
)
def test_shapes_that_are_refused(make_spec: MakeSpec, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        make_spec("vit_nano", **changes)
    assert str(refusal.value) == message
