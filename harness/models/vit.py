"""The vision transformer: patches as tokens, a class token, LayerNorm before each branch.

Shapes: B batch, Y rows, X columns, T = patches + 1 tokens, D width, F hidden width, P patch size.

Source: Dosovitskiy et al. 2020, arXiv:2010.11929, section 3.1 and appendix B.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from harness.errors import ConfigError
from harness.models.base import Batch, require_divides, require_even_heads
from harness.models.parts import context_attention, image_classifier
from harness.models.shapes.transformer import TransformerSpec

if TYPE_CHECKING:
    from torch import Tensor, nn

    from harness.models.parts.context_attention import Ring

_CHANNELS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ViTSpec(TransformerSpec):
    """A vision transformer of any size, on images and classes drawn at random.

    Fields:
        image_size: rows and columns of an image in pixels, a multiple of `patch_size`.
        patch_size: rows and columns P of a patch in pixels, >= 1.
        n_classes: classes of images, >= 1.
    """

    has_outputs_of_parts: ClassVar[bool] = False

    image_size: int
    patch_size: int
    n_classes: int

    def check_shape(self) -> None:
        """Refuse heads that do not divide the width, and patches that do not divide the image."""
        TransformerSpec.check_shape(self)
        require_divides("patch_size", self.patch_size, "image_size", self.image_size)

    @property
    def n_patches(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    def build(self) -> nn.Module:
        """Return a `ViT`."""
        patches = torch.nn.Conv2d(_CHANNELS, self.width, self.patch_size, stride=self.patch_size)
        return image_classifier.ViT(self, patches=patches, n_patches=self.n_patches, n_classes=self.n_classes)

    def check_context(self, *, sequence_length: int, cp: int, cp_method: str, tp: int) -> None:  # noqa: ARG002 (an image has its own size)
        """Refuse ranks that would have no token, and for `ulysses` heads that they cannot share evenly."""
        length, padding = self._parts(cp)
        if padding >= length:
            problem = f"must leave each rank some of the {self.n_patches + 1} tokens of an image, got {cp}"
            raise ConfigError("mesh.cp", f"{problem}; use fewer")
        require_even_heads(self.tensor_parallel_sizes(), cp=cp, cp_method=cp_method, tp=tp)

    def sequence_part(self, batch: Batch, part: int, parts: int) -> Batch:  # noqa: ARG002 (the model cuts)
        """Return the batch: tokens are made of whole images, and cut by the model."""
        return batch

    def attend_over_parts(self, model: nn.Module, method: str, ring: Ring) -> None:
        """Let each rank compute its part of the tokens; the last part is padded."""
        length, padding = self._parts(ring.size)
        context_attention.attend_over(model, method, ring, padding=padding)
        model.parts = context_attention.PaddedParts(ring=ring, length=length, padding=padding)  # type: ignore[assignment]  # no module

    def _parts(self, count: int) -> tuple[int, int]:
        """Return the tokens of a part, and how many of the last one stand for none."""
        length = -(-(self.n_patches + 1) // count)
        return length, length * count - self.n_patches - 1

    def sample_batch(self, batch_size: int, random: np.random.Generator) -> Batch:
        """Return normal images, float32 of shape (B, 3, Y, X), and uniform classes, int64 of shape (B,)."""
        shape = (batch_size, _CHANNELS, self.image_size, self.image_size)
        images_BCYX = random.standard_normal(shape, dtype=np.float32)
        classes_B = random.integers(self.n_classes, size=batch_size)
        return Batch(inputs=(torch.from_numpy(images_BCYX),), targets=torch.from_numpy(classes_B))

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the mean cross entropy of `outputs`, logits of shape (B, classes), in float32."""
        return torch.nn.functional.cross_entropy(outputs.float(), batch.targets)

    def flops_per_sample(self, sequence_length: int) -> int:  # noqa: ARG002 (an image has its own size)
        """Return 6·D·P² a patch, L·(8·D² + 4·T·D + 4·D·F) a token, and 2·D a class."""
        n_tokens = self.n_patches + 1
        patches = 2 * self.n_patches * _CHANNELS * self.patch_size**2 * self.width
        blocks = n_tokens * self.n_layers * self.block_flops(n_tokens)
        return patches + blocks + 2 * self.width * self.n_classes
