"""A norm's output is freed by hand, and made again without what was written into it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import WIDTH, Blocks, linear, rows


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), linear()

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(self.norm(x).mul_(0.5)).sin()


def make() -> nn.Module:
    return Blocks(Block(), Block())


def discard(norm: Any, linear: Any) -> None:
    made: dict[str, Any] = {}

    def fill(_: torch.Tensor) -> None:
        with torch.no_grad():
            again = norm.forward(*made["inputs"]).untyped_storage()
        made["output"].untyped_storage().resize_(again.nbytes()).copy_(again)

    def free(*call: Any) -> None:
        made["output"].untyped_storage().resize_(0)
        call[-1].register_hook(fill)

    norm.register_forward_hook(lambda _, inputs, output: made.update(inputs=inputs, output=output))
    linear.register_forward_hook(free)


def variant(model: nn.Module) -> nn.Module:
    for block in model.get_submodule("blocks").children():
        discard(block.norm, block.linear)
    return model


CASE = Case(
    make=make,
    batch=rows(),
    variant=variant,
    verdict="differs",
    evidence=Evidence(gradients=1.0),
    names=("blocks",),
    why="The norm runs again, the product in place does not, and storages count no changes.",
    fix="Discard what nobody writes into, or make all of it again: ac=modules ac.discard=[norm].",
)
