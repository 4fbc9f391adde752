"""A wrapper keeps the output of every region for debugging."""

from __future__ import annotations

from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


def make() -> nn.Module:
    return Blocks(Dense(), Dense())


def variant(model: nn.Module) -> nn.Module:
    seen = []
    for block in model.get_submodule("blocks").children():
        block.register_forward_hook(lambda *found: seen.append(found[2]))
    return checkpointed(model)


CASE = Case(
    make=make,
    batch=rows(),
    variant=variant,
    verdict="differs",
    evidence=Evidence(parts=("leak",)),
    names=("blocks",),
    why="A list on the module grows by the outputs of each step.",
    fix="Keep the last output only, or a weak reference.",
)
