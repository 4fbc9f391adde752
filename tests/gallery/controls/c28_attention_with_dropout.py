"""An encoder layer of torch, with dropout."""

from __future__ import annotations

from torch import nn

from tests.gallery.case import Case
from tests.gallery.parts import WIDTH, Blocks, checkpointed, rows


def make() -> nn.Module:
    return Blocks(*(nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True) for _ in range(2)))


CASE = Case(
    make=make,
    batch=(rows(12)[0].view(2, 6, WIDTH),),
    variant=checkpointed,
    like=11,
    why="All of its masks come from torch's default generator.",
)
