"""The vision transformer: patches as tokens, a class token, LayerNorm before each branch.

Shapes: B batch, C channels, Y rows, X columns, T = patches + 1 tokens, D width, F hidden width.

Source: Dosovitskiy et al. 2020, arXiv:2010.11929, section 3.1 and appendix B.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.models.base import Batch, ModelSpec, require_divides, require_shape
from harness.models.parts.attention import SelfAttention
from harness.models.parts.initialisation import initialise

_CHANNELS = 3
_NORM_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class ViTSpec(ModelSpec):
    """A vision transformer of any size, on images and classes drawn at random.

    Fields:
        n_layers: blocks L, >= 1.
        width: residual width D, a multiple of `n_heads`.
        n_heads: attention heads, >= 1.
        hidden_width: width F of the feed-forward, >= 1.
        image_size: rows and columns of an image in pixels, a multiple of `patch_size`.
        patch_size: rows and columns P of a patch in pixels, >= 1.
        n_classes: classes of images, >= 1.
    """

    n_layers: int
    width: int
    n_heads: int
    hidden_width: int
    image_size: int
    patch_size: int
    n_classes: int

    def __post_init__(self) -> None:
        require_shape(
            self,
            n_layers=self.n_layers,
            width=self.width,
            n_heads=self.n_heads,
            hidden_width=self.hidden_width,
            image_size=self.image_size,
            patch_size=self.patch_size,
            n_classes=self.n_classes,
        )
        require_divides("n_heads", self.n_heads, "width", self.width)
        require_divides("patch_size", self.patch_size, "image_size", self.image_size)

    @property
    def n_patches(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    def build(self) -> nn.Module:
        """Return a `ViT`."""
        return ViT(self)

    def sample_batch(self, batch_size: int, random: np.random.Generator) -> Batch:
        """Return normal images, float32 of shape (B, 3, Y, X), and uniform classes, int64 of shape (B,)."""
        shape = (batch_size, _CHANNELS, self.image_size, self.image_size)
        images_BCYX = random.standard_normal(shape, dtype=np.float32)
        classes_B = random.integers(self.n_classes, size=batch_size)
        return Batch(inputs=(torch.from_numpy(images_BCYX),), targets=torch.from_numpy(classes_B))

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the mean cross entropy of `outputs`, logits of shape (B, classes), in float32."""
        return functional.cross_entropy(outputs.float(), batch.targets)

    def flops_per_sample(self, sequence_length: int) -> int:  # noqa: ARG002 (an image has its own size)
        """Return 6·D·P² a patch, L·(8·D² + 4·T·D + 4·D·F) a token, and 2·D a class."""
        n_tokens = self.n_patches + 1
        attention = 8 * self.width**2 + 4 * n_tokens * self.width
        feed_forward = 4 * self.width * self.hidden_width
        patches = 2 * self.n_patches * _CHANNELS * self.patch_size**2 * self.width
        return (
            patches + n_tokens * self.n_layers * (attention + feed_forward) + 2 * self.width * self.n_classes
        )

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Return Megatron's plan: heads and hidden units are split, everything else is whole."""
        return {
            "layers.*.attention.wq": "column",
            "layers.*.attention.wk": "column",
            "layers.*.attention.wv": "column",
            "layers.*.attention.wo": "row",
            "layers.*.feed_forward.up": "column",
            "layers.*.feed_forward.down": "row",
        }

    def tensor_parallel_sizes(self) -> dict[str, int]:
        """Return the heads and the hidden width."""
        return {"model.n_heads": self.n_heads, "model.hidden_width": self.hidden_width}


class ViT(nn.Module):
    """Class logits of images."""

    def __init__(self, spec: ViTSpec) -> None:
        super().__init__()
        self.patches = nn.Conv2d(_CHANNELS, spec.width, spec.patch_size, stride=spec.patch_size)
        self.class_token = nn.Parameter(torch.zeros(1, 1, spec.width))
        self.position = nn.Embedding(spec.n_patches + 1, spec.width)
        self.dropout = nn.Dropout(spec.dropout)
        self.layers = nn.ModuleList(ViTBlock(spec) for _ in range(spec.n_layers))
        self.norm = nn.LayerNorm(spec.width, eps=_NORM_EPSILON)
        self.head = nn.Linear(spec.width, spec.n_classes)
        initialise(self, n_layers=spec.n_layers)

    def forward(self, images_BCYX: Tensor) -> Tensor:
        """Return logits of shape (B, classes)."""
        patches_BDYX = self.patches(images_BCYX.to(self.patches.weight.dtype))
        x_BTD = patches_BDYX.flatten(2).transpose(1, 2)
        x_BTD = torch.cat((self.class_token.expand(x_BTD.size(0), -1, -1), x_BTD), dim=1)
        x_BTD = self.dropout(x_BTD + self.position.weight)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        logits: Tensor = self.head(self.norm(x_BTD[:, 0]))
        return logits


class ViTBlock(nn.Module):
    """Attention, then feed-forward, each behind a LayerNorm and added to its input."""

    def __init__(self, spec: ViTSpec) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(spec.width, eps=_NORM_EPSILON)
        self.attention = SelfAttention(width=spec.width, n_heads=spec.n_heads, dropout=spec.dropout)
        self.feed_forward_norm = nn.LayerNorm(spec.width, eps=_NORM_EPSILON)
        self.feed_forward = FeedForward(spec)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return a tensor of shape (B, T, D)."""
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD)))
        output: Tensor = x_BTD + self.dropout(self.feed_forward(self.feed_forward_norm(x_BTD)))
        return output


class FeedForward(nn.Module):
    """`down(dropout(gelu(up(x))))` with the exact GELU."""

    def __init__(self, spec: ViTSpec) -> None:
        super().__init__()
        self.up = nn.Linear(spec.width, spec.hidden_width)
        self.dropout = nn.Dropout(spec.dropout)
        self.down = nn.Linear(spec.hidden_width, spec.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return a tensor of shape (B, T, D)."""
        output: Tensor = self.down(self.dropout(functional.gelu(self.up(x_BTD))))
        return output
