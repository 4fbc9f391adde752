"""Checkpointing asks for train mode, and the model is fine-tuned in eval mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, Dense, rows


class Flagged(Dense):
    gradient_checkpointing = False

    def forward(self, x: torch.Tensor) -> Any:
        if self.training and self.gradient_checkpointing:
            return checkpoint(super().forward, x, use_reentrant=False)
        return super().forward(x)


def make() -> nn.Module:
    return Blocks(Flagged(), Flagged()).eval()


def variant(model: nn.Module) -> nn.Module:
    for block in model.get_submodule("blocks").children():
        vars(block)["gradient_checkpointing"] = True
    return model


CASE = Case(
    make=make,
    batch=rows(),
    variant=variant,
    verdict="inert",
    evidence=Evidence(parts=()),
    names=("nothing", "inert", "saved"),
    link="https://github.com/huggingface/diffusers/issues/9850",
    why="The branch is `if self.training and self.gradient_checkpointing`.",
    fix="Call model.train() with dropout at 0, or ask for torch.is_grad_enabled() instead.",
)
