"""A save list names mm, and layers with a bias run addmm."""

from __future__ import annotations

from torch import nn

from strategies.ac.selective_op import SelectiveOp
from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, Dense, rows


def make() -> nn.Module:
    return Blocks(Dense(), Dense())


CASE = Case(
    make=make,
    batch=rows(),
    variant=SelectiveOp(layers_fqn="blocks", save_ops=("aten.mm.default",)),
    verdict="inert",
    evidence=Evidence(parts=(), saves=True),
    names=("aten.mm.default",),
    link="https://github.com/pytorch/pytorch/issues/176065",
    why="nn.Linear with a bias is aten.addmm: the list matches nothing, and all is recomputed.",
    fix="Name the group matmul, which has all of them.",
)
