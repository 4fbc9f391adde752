"""The vision transformer's modules.

Shapes: B batch, C channels, Y rows, X columns, T = patches + 1 tokens, D width.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from harness.models.parts.attention import SelfAttention
from harness.models.parts.context_attention import PaddedParts
from harness.models.parts.feed_forward import FeedForward
from harness.models.parts.initialisation import initialise
from harness.models.parts.transformer_block import TransformerBlock
from harness.models.shapes.transformer import TransformerSpec

_LayerNorm = partial(nn.LayerNorm, eps=1e-6)


class ViT(nn.Module):
    """Class logits of images.

    Args:
        spec: sizes of the blocks.
        patches: makes (B, D, Y, X) of images.
        n_classes: logits.
    """

    parts: PaddedParts | None = None
    """Says which tokens are this rank's, where ranks share them."""

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

    def forward(self, images_BCYX: Tensor) -> Tensor:
        """Return logits of shape (B, classes)."""
        patches_BDYX = self.patches(images_BCYX.to(self.patches.weight.dtype))
        x_BTD = patches_BDYX.flatten(2).transpose(1, 2)
        x_BTD = torch.cat((self.class_token.expand(x_BTD.size(0), -1, -1), x_BTD), dim=1)
        x_BTD = x_BTD + self.position.weight
        x_BTD = self.dropout(x_BTD if self.parts is None else self.parts.own(x_BTD))
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        first_BD = x_BTD[:, 0] if self.parts is None else self.parts.first(x_BTD)
        logits: Tensor = self.head(self.norm(first_BD))
        return logits


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
