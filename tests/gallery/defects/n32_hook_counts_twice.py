"""A forward hook in a region counts every call twice."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


def count(module: Any, *_: Any) -> None:
    module.calls += 1


def make() -> nn.Module:
    block: Any = Dense()
    block.linear.calls = 0
    block.linear.register_forward_hook(count)
    return Blocks(block)


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    verdict="differs",
    evidence=Evidence(parts=("state",)),
    names=("calls", "blocks"),
    why="Hooks of modules in the region run in forward and in recomputation.",
    fix="Put the hook on the checkpointed module itself, or skip it in recomputation.",
)
