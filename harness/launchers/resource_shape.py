"""Resource shapes: what a trial needs of a machine or a cluster."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from harness.experiment.mesh import Mesh

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Shape:
    """Nodes, ranks on each of them, and the device a rank computes on.

    Fields:
        nodes: >= 1.
        ranks_per_node: >= 1.
        device: `auto`, `cuda` or `cpu`, as `mesh.device` says it.
    """

    nodes: int
    ranks_per_node: int
    device: str

    @property
    def label(self) -> str:
        """The shape without its device: `2x4` is two nodes of four ranks."""
        return f"{self.nodes}x{self.ranks_per_node}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """The share of a node that a trial has to itself.

    Fields:
        core_count: cores that its ranks share between them, >= 1.
        cores: those cores, to which the ranks are pinned; `None` leaves it to the operating system or the
            scheduler.
    """

    core_count: int
    cores: tuple[int, ...] | None = None

    def threads_of_rank(self, ranks: int) -> int:
        """Return the threads of each of `ranks`: its share of the cores, and no more than the user allows.

        The user's word is `OMP_NUM_THREADS`, which torch takes for its own default.
        """
        allowed = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
        share = max(1, self.core_count // ranks)
        return min(share, int(allowed)) if allowed.isdecimal() and int(allowed) > 0 else share


def shape_of(mesh: Mesh) -> Shape:
    """Return the shape that a trial on `mesh` needs."""
    return Shape(nodes=mesh.nodes, ranks_per_node=mesh.ranks_per_node, device=mesh.device)


def by_shape(items: Iterable[tuple[Shape, T]]) -> dict[Shape, list[T]]:
    """Return the items grouped by shape, smallest shape first, in their order within a shape."""
    ordered = sorted(items, key=lambda item: item[0])
    return {shape: [each for _, each in group] for shape, group in groupby(ordered, key=lambda item: item[0])}


def shapes_in_words(counts: dict[Shape, int]) -> str:
    """Return `1x1: 6, 1x2: 8`; devices are named where there are several."""
    devices = {shape.device for shape in counts}
    return ", ".join(
        f"{shape.label}{f' {shape.device}' if len(devices) > 1 else ''}: {count}"
        for shape, count in counts.items()
    )
