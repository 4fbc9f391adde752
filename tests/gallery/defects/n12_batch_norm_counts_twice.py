"""Running statistics of batch norm are updated twice a step."""

from __future__ import annotations

from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import WIDTH, Blocks, checkpointed, linear, rows


def make() -> nn.Module:
    return Blocks(nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), nn.Tanh()))


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    verdict="differs",
    evidence=Evidence(parts=("buffers",)),
    names=("blocks",),
    link="https://github.com/pytorch/pytorch/issues/96136",
    why="Recomputation runs the batch norm a second time; evaluation then uses other statistics.",
    fix="Keep batch norm out of the region, or put its buffers back (acbench: ac.rewind=true).",
)
