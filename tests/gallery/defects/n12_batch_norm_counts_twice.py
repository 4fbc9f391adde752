"""Running statistics of batch norm are updated twice a step."""

from __future__ import annotations

from torch import nn

from tests.gallery.facts import Defect
from tests.gallery.parts import WIDTH, Blocks, checkpointed, linear, rows

FACTS = Defect(
    parts=("buffers",),
    link="https://github.com/pytorch/pytorch/issues/96136",
    cause="Recomputation runs the batch norm a second time; evaluation then uses other statistics.",
    fix="Keep batch norm out of the region, or put its buffers back (acbench: ac.rewind=true).",
)


def make() -> nn.Module:
    return Blocks(nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), nn.Tanh()))


batch = rows()
variant = checkpointed
