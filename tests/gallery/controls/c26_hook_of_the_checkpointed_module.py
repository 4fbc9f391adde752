"""A forward hook counts calls of the checkpointed module itself."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.gallery.case import Case
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


def count(module: Any, *_: Any) -> None:
    module.calls += 1


def make() -> nn.Module:
    block: Any = Dense()
    block.calls = 0
    block.register_forward_hook(count)
    return Blocks(block, Dense())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    like=32,
    why="The hook is outside of the region, and recomputation does not call it.",
)
