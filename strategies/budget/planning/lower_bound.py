"""Lower bounds of any schedule of a step's operators: fewest FLOPs run again, and smallest peak.

A *schedule* runs each operator of the step at least once, in any order and as often as it likes. An operator
runs where the storages of its operands are there, whole, with the content that it reads; its results are new
storages. Storages are dropped at will, and moved to the host and back where it has room; operands and results
of what runs are on the device. Cutting operators in chunks is no part of it. What an operator writes in place
may be wanted by nobody, or half of it, and the graph does not say by whom: so an operator *follows* only from
those that make the storages that it reads, and from what they follow from, and is never charged for writes.
That is less than a schedule must do.

Take one operator b, and in any schedule the moment at which it runs for the first time. Then:

1. Its operands and results are there, and so is what is never freed.
2. All that it follows from has run, for nothing exists that its maker has not made.
3. What follows from b, and is not b, has not run. All of it runs later, and has its operands then.
4. So a storage whose maker b follows from, and that an operator of 3 reads or the end of the step finds, is
   there now, maybe on the host (`there` = 1), or its maker runs after b (`again` = 1): `there` + `again` >=
   1.
5. A maker that runs after b has its own operands then. Each was made before b, by 2, so it is there now or is
   made again as well: `there` + `again` >= `again` of its reader.
6. Each maker that runs after b ran before it, by 2, so its cost is paid again: the sum of cost times `again`.
7. What is there now, with the results of b, is within the budget and the room on the host together: the sum
   of bytes times `there`.

A schedule gives each unknown the value 0 or 1. The least cost with values between is no more: the bound is
the largest over several b. In small steps the least cost with whole values is sought at that b, too, and
what branch and bound has proven of it counts. What exists several times, or was made again before b, is
counted once.

`recomputation` solves both programmes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import compress

import numpy as np
import numpy.typing as npt

from strategies.budget.planning.recomputation import Maker, Moment, Recomputation
from strategies.step.step_graph import StepGraph, StepOperator

_TRIED = 6
_CONSIDERED = 32


class LowerBound:
    """Bounds for one step.

    Args:
        cost: cost of running an operator again.
        blocks: calls of blocks in the step; those of the graph where nobody says.
    """

    def __init__(
        self,
        graph: StepGraph,
        cost: Callable[[StepOperator], float] = lambda operator: operator.flops,
        *,
        blocks: int | None = None,
    ) -> None:
        self._graph = graph
        self._blocks = max(len(graph.calls) if blocks is None else blocks, 1)
        self._reads = _reads_of_step(graph.operators)
        self._maker = {
            storage: index for index, operator in enumerate(graph.operators) for storage in operator.makes
        }
        makers = [
            Maker(reads=reads, cost=cost(operator))
            for operator, reads in zip(graph.operators, self._reads, strict=True)
        ]
        self._recomputation = Recomputation(
            {storage: makers[index] for storage, index in self._maker.items()}, graph.nbytes
        )
        self._moments = self._chosen()

    def minimum_bytes(self) -> int:
        """Return a peak that every schedule reaches: operands and results of one operator."""
        return self._graph.fixed_bytes + max(
            (self._bytes_of(self._own(index)) for index in range(len(self._graph.operators))), default=0
        )

    def cost(self, budget_bytes: int, host_bytes: int = 0) -> float:
        """Return the least cost of what runs again within a budget; infinite where no schedule keeps it.

        Args:
            budget_bytes: most bytes on the device.
            host_bytes: most bytes on the host.
        """
        if self.minimum_bytes() > budget_bytes:
            return np.inf
        return self._recomputation.highest(self._moments, budget_bytes + host_bytes)

    def _own(self, index: int) -> frozenset[int]:
        return self._reads[index] | self._graph.operators[index].makes.keys()

    def _bytes_of(self, storages: Iterable[int]) -> int:
        return sum(self._graph.nbytes[storage] for storage in storages)

    def _chosen(self) -> list[Moment]:
        graph = self._graph
        backward = [index for index, each in enumerate(graph.operators) if not each.is_forward]
        early = backward[: len(backward) // self._blocks * 2 + 16]
        before, after = _ancestors(graph.operators, self._reads), _later_reads(graph.operators)
        # after a weight's gradient, nothing but the update is needed: little follows from it
        most = max((after[index].bit_count() for index in early), default=0)
        early = [index for index in early if 2 * after[index].bit_count() >= most]
        early.sort(key=lambda index: self._bytes_of(self._own(index)), reverse=True)
        outliving = sum(1 << storage for storage in graph.gradients)
        made, makers = list(self._maker), list(self._maker.values())
        size = max(len(graph.operators), *graph.nbytes) + 1
        moments = []
        for index in early[:_CONSIDERED]:
            ran, needed = before[index] & ~(1 << index), after[index] | outliving
            own = self._own(index)
            has_run, is_needed = (_flags(bits, size) for bits in (ran, needed))
            wanted = frozenset(compress(made, (has_run[makers] & is_needed[made]).tolist()))
            held_bytes = graph.fixed_bytes + self._bytes_of(own)
            moments.append(Moment(there=own, wanted=wanted - own, held_bytes=held_bytes))
        return sorted(moments, key=self._most_bytes, reverse=True)[:_TRIED]

    def _most_bytes(self, moment: Moment) -> int:
        return moment.held_bytes + self._bytes_of(moment.wanted)


def _flags(bits: int, size: int) -> npt.NDArray[np.bool_]:
    """Return which of so many numbers are in a set of bits."""
    held = np.frombuffer(bits.to_bytes((size + 7) // 8, "little"), dtype=np.uint8)
    return np.unpackbits(held, count=size, bitorder="little").astype(np.bool_)


def _reads_of_step(operators: Sequence[StepOperator]) -> list[frozenset[int]]:
    made: set[int] = set()
    found = []
    for operator in operators:
        found.append(operator.reads & made)
        made.update(operator.makes)
    return found


def _ancestors(operators: Sequence[StepOperator], reads: Sequence[frozenset[int]]) -> list[int]:
    found: list[int] = []
    made: dict[int, int] = {}  # a storage's maker, and what that follows from
    for index, operator in enumerate(operators):
        bits = 1 << index
        for storage in reads[index]:
            bits |= made[storage]
        found.append(bits)
        made |= dict.fromkeys(operator.makes, bits)
    return found


def _later_reads(operators: Sequence[StepOperator]) -> list[int]:
    found = [0] * len(operators)
    read_by: dict[int, int] = {}  # what the readers of a storage, and all that follow, read
    for index in range(len(operators) - 1, -1, -1):
        operator = operators[index]
        bits = 0
        for storage in operator.reads:
            bits |= 1 << storage
        for storage in operator.makes:
            bits |= read_by.get(storage, 0)
        found[index] = bits
        for storage in operator.reads:
            read_by[storage] = read_by.get(storage, 0) | bits
    return found
