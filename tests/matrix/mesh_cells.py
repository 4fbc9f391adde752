"""Cells of meshes: variants where ranks hold parts of sequences or some of the experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from harness.measure.work.counter import PHASES
from harness.records.record import Record
from tests.matrix.steps_in_parts import Cell

VARIANTS = (
    "ac=none",
    "ac=offload",
    "ac=full",
    "ac=selective_layer ac.ac_freq=2",
    "ac=selective_op",
    "ac=selective_op ac.save_ops=[matmul,attention]",
    "ac=selective_op ac.save_ops=[matmul,attention,comm]",
    "ac=nested",
    "ac=budget ac.fraction=0.9",
)
PLACES = {
    "mesh=cp2 mesh.cp_method=gather": {"all_gather", "reduce_scatter"},
    "mesh=cp2 mesh.cp_method=ring": {"all_to_all"},
    "mesh=cp2 mesh.cp_method=ulysses": {"all_to_all"},
    "mesh=ep2": {"all_to_all"},
    "mesh=ep2 mesh.ep_capacity=1.25": {"all_to_all"},
    "mesh=sp_tp2": {"all_gather", "reduce_scatter", "all_reduce"},
    "mesh=sp_tp2 mesh.loss_parallel=true": {"all_gather", "reduce_scatter", "all_reduce"},
}
"""Each with the collectives of its axis; others are of the ranks that share weights: DDP's, or FSDP's."""

_SIZES = (
    "model.n_layers=4",
    "model.width=32",
    "model.hidden_width=64",
    "model.dropout=0.1",
    "data=synthetic",
    "batch_size=4",
    "sequence_length=64",
    "optimizer=sgd",
    "protocol=smoke",
    "mesh.device=cpu",
)


@dataclass(frozen=True, kw_only=True)
class MeshCell(Cell):
    """A variant on a mesh."""

    @property
    def axis(self) -> str:
        """Axis of the mesh: `cp`, `ep` or `sp`."""
        return self.place.removeprefix("mesh=")[:2]

    @property
    def sizes(self) -> Sequence[str]:
        """Words of all cells, and the model."""
        return (*_SIZES, "model=moe_nano" if self.axis == "ep" else "model=llama_nano")

    def costs(self, record: Record) -> dict[str, Any]:
        """Return the proof and the collectives of a trial by axis; nothing of one that did not end.

        Collectives are those in forward, in backward and in the optimizer, and how many are repeated.
        """
        work, parity = record.work, record.parity
        if work is None or parity is None:
            return {}
        counts = [*(work.collectives[phase] for phase in PHASES), work.collectives_repeated]
        own = PLACES[self.place]
        return {
            "twin": parity.level,
            "dense": " ".join(each.level for each in parity.chain),
            self.axis: [sum(each[name] for name in each.keys() & own) for each in counts],
            "weights": [sum(each[name] for name in each.keys() - own) for each in counts],
        }


def cells() -> Iterator[MeshCell]:
    """Yield all cells, those of one place together."""
    for place in PLACES:
        yield from (MeshCell(variant=variant, place=place) for variant in VARIANTS)


def counts_of(cells: Sequence[Cell], endings: Sequence[str]) -> str:
    """Return how many cells ended how, and the same of the first row of each variant.

    Args:
        cells: the cells.
        endings: how each ended.
    """
    first: dict[str, str] = {}
    for cell in cells:
        first.setdefault(cell.variant.split()[0], cell.variant)
    rows = [ending for cell, ending in zip(cells, endings, strict=True) if cell.variant in first.values()]
    said = _counts(endings)
    return said if len(rows) == len(endings) else f"{said}; of one row a variant {_counts(rows)}"


def _counts(endings: Sequence[str]) -> str:
    words = [ending.partition(":")[0] for ending in endings]
    neutral, refused = words.count("neutral"), words.count("refused")
    others = len(words) - neutral - refused
    shares = f"{neutral / len(words):.1%} of all, {neutral / (len(words) - refused):.1%} of those that run"
    return f"{len(words)} cells: {neutral} neutral ({shares}), {refused} refused, {others} other"
