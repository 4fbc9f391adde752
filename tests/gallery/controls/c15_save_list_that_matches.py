"""A save list that names what runs."""

from __future__ import annotations

from torch import nn

from strategies.ac.selective_op import SelectiveOp
from tests.gallery.facts import Control
from tests.gallery.parts import Blocks, Dense, rows

FACTS = Control(like=31, why="The group matmul has addmm.")


def make() -> nn.Module:
    return Blocks(Dense(), Dense())


batch = rows()
variant = SelectiveOp(layers_fqn="blocks", save_ops=("matmul",))
