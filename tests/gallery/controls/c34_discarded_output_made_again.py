"""A norm's output is discarded by name, and what was written into it is made again too."""

from __future__ import annotations

from strategies.ac.modules import Modules
from tests.gallery.case import Case
from tests.gallery.defects.n68_discarded_output_written_in_place import make
from tests.gallery.parts import rows

CASE = Case(
    make=make,
    batch=rows(),
    variant=Modules(layers_fqn="blocks", discard=("norm",)),
    like=68,
    why="Writes to a storage are operators of its history, and run again with the norm.",
)
