"""LoRA adapters behind a frozen embedding, non-reentrant."""

from __future__ import annotations

import torch

from tests.gallery.case import Case
from tests.gallery.defects.n48_lora_behind_a_frozen_embedding import make
from tests.gallery.parts import checkpointed

CASE = Case(
    make=make,
    batch=(torch.arange(12).view(3, 4),),
    variant=checkpointed,
    like=48,
    why="Regions are connected by their outputs, which require gradients.",
)
