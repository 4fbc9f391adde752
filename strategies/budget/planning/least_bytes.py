"""The fewest bytes to keep of a block so that chosen units need not run again: minimum cuts.

What is recomputed follows from what is not kept. A unit with a price runs again, and costs its price, unless
each path from its results to what autograd saves crosses a kept storage, which costs its bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from strategies.budget.planning.block_program import BlockProgram
from strategies.estimate.scipy_modules import scipy

_LARGEST = 1 << 29  # of 32 bits, and sums of a few
_SOURCE, _SINK = 0, 1


class LeastBytes:
    """The cuts of one program."""

    def __init__(self, program: BlockProgram) -> None:
        self._program = program
        units = len(program.units)
        storages = range(len(program.nbytes))
        self._unit = [2 + unit for unit in range(units)]
        self._into = [2 + units + 2 * storage for storage in storages]
        arcs: dict[tuple[int, int], float] = {}
        for index, unit in enumerate(program.units):
            arcs[_SOURCE, self._unit[index]] = 0.0
            for made in unit.makes:
                arcs[self._unit[index], self._into[made]] = np.inf
                arcs |= {(self._into[s] + 1, self._into[made]): np.inf for s in unit.reads if s >= 0}
        for storage in storages:
            nbytes = np.inf if storage in program.older else max(program.nbytes[storage], 1)
            arcs[self._into[storage], self._into[storage] + 1] = float(nbytes)
        arcs |= {(self._into[storage] + 1, _SINK): np.inf for storage in program.saved}
        self._ends = np.array(sorted(arcs), dtype=np.int32)
        self._capacities = np.array([arcs[int(a), int(b)] for a, b in self._ends])
        self._prices = {int(b) - 2: place for place, (a, b) in enumerate(self._ends) if a == _SOURCE}
        self._size = 2 + units + 2 * len(program.nbytes)

    def keeps(self, prices: Mapping[int, float]) -> Iterable[frozenset[int]]:
        """Return the one or two sets of storages that cost the least, nearest to the makers and to the uses.

        Args:
            prices: what it costs that a unit runs again, in bytes; infinite where it must not; 0 of others.
        """
        capacities = self._capacities.copy()
        for unit, price in prices.items():
            capacities[self._prices[unit]] = price
        finite = capacities[np.isfinite(capacities)]
        scale = min(1.0, _LARGEST / max(float(finite.sum()), 1.0))
        whole = np.where(np.isfinite(capacities), np.ceil(capacities * scale), _LARGEST * 2.0)
        graph = self._graph(whole.astype(np.int32))
        rest = graph - scipy("sparse.csgraph").maximum_flow(graph, _SOURCE, _SINK).flow
        rest.eliminate_zeros()
        return {
            self._cut(self._reached(rest, _SOURCE)),
            self._cut(frozenset(range(self._size)) - self._reached(rest.T.tocsr(), _SINK)),
        }

    def _graph(self, capacities: npt.NDArray[np.int32]) -> Any:
        starts = np.concatenate([[0], np.cumsum(np.bincount(self._ends[:, 0], minlength=self._size))])
        return scipy("sparse").csr_array(
            (capacities, self._ends[:, 1], starts.astype(np.int32)), shape=(self._size, self._size)
        )

    def _reached(self, rest: Any, start: int) -> frozenset[int]:
        rest.eliminate_zeros()
        return frozenset(
            map(int, scipy("sparse.csgraph").breadth_first_order(rest, start, return_predecessors=False))
        )

    def _cut(self, reached: frozenset[int]) -> frozenset[int]:
        return frozenset(
            s for s, node in enumerate(self._into) if node in reached and node + 1 not in reached
        )
