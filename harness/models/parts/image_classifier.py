"""The vision transformer's modules.

Shapes: B batch, C channels, Y rows, X columns, T = patches + 1 tokens, D width.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from harness.models.parts.attention import SelfAttention
from harness.models.parts.feed_forward import FeedForward
from harness.models.parts.initialisation import initialise
from harness.models.parts.transformer_block import TransformerBlock
from harness.models.shapes.transformer import TransformerSpec

_LayerNorm = partial(nn.LayerNorm, eps=1e-6)


class ViT(nn.Module):
    """Class logits of images.

    A stage of a pipeline has some of the blocks; the first alone reads images, the last alone has the head.

    Args:
        spec: sizes of the blocks.
        patches: makes (B, D, Y, X) of images.
        n_patches: patches of an image.
        n_classes: logits.
    """

    patches: nn.Conv2d | None
    norm: nn.Module | None

    def __init__(self, spec: TransformerSpec, *, patches: nn.Conv2d, n_patches: int, n_classes: int) -> None:
        super().__init__()
        self.patches = patches
        self.class_token = nn.Parameter(torch.zeros(1, 1, spec.width))
        self.position = nn.Embedding(n_patches + 1, spec.width)
        self.dropout = nn.Dropout(spec.dropout)
        self.layers = nn.ModuleList(ViTBlock(spec) for _ in range(spec.n_layers))
        self.norm = _LayerNorm(spec.width)
        self.head = nn.Linear(spec.width, n_classes)
        initialise(self, n_layers=spec.n_layers)

    def forward(self, given: Tensor) -> Tensor:
        """Return logits of shape (B, classes); of a stage that is not the last, what its last block gives.

        Args:
            given: images of shape (B, C, Y, X); of a stage that is not the first, what the stage before
                gives, of shape (B, T, D).
        """
        x_BTD = given if self.patches is None else self._tokens(self.patches, given)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        if self.norm is None:
            return x_BTD
        logits: Tensor = self.head(self.norm(x_BTD[:, 0]))
        return logits

    def _tokens(self, patches: nn.Conv2d, images_BCYX: Tensor) -> Tensor:
        """Return the first block's input of shape (B, T, D)."""
        patches_BDYX = patches(images_BCYX.to(patches.weight.dtype))
        x_BTD = patches_BDYX.flatten(2).transpose(1, 2)
        x_BTD = torch.cat((self.class_token.expand(x_BTD.size(0), -1, -1), x_BTD), dim=1)
        tokens_BTD: Tensor = self.dropout(x_BTD + self.position.weight)
        return tokens_BTD


class ViTBlock(TransformerBlock):
    """Attention among all tokens, and a feed-forward with the exact GELU."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__(
            spec,
            norm=_LayerNorm,
            attention=SelfAttention(width=spec.width, n_heads=spec.n_heads, dropout=spec.dropout),
            feed_forward=FeedForward(
                width=spec.width, hidden_width=spec.hidden_width, dropout=spec.dropout, approximate="none"
            ),
        )
