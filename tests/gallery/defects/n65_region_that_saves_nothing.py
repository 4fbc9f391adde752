"""A region is one linear layer, which needs its input only."""

from __future__ import annotations

from torch import nn

from tests.gallery.facts import Defect
from tests.gallery.parts import Blocks, checkpointed, linear, rows

FACTS = Defect(
    parts=(),
    verdict="inert",
    names=("nothing", "inert", "saved"),
    cause="A region keeps its input, and that is all that the layer keeps without one.",
    fix="Make regions of whole blocks.",
)


def make() -> nn.Module:
    return Blocks(linear(), linear(), linear())


batch = rows()
variant = checkpointed
