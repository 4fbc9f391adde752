"""A saved product is changed in place through a view, and the save list is this package's."""

from __future__ import annotations

from strategies.ac.selective_op import SelectiveOp
from tests.gallery.case import Case
from tests.gallery.defects.n67_saved_product_changed_through_an_alias import make
from tests.gallery.parts import rows

CASE = Case(
    make=make,
    batch=rows(),
    variant=SelectiveOp(layers_fqn="blocks", save_ops=("aten.mm.default", "aten.sin.default")),
    like=67,
    why="It asks for writes to the storage, and computes again what is written.",
)
