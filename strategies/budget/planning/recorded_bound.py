"""The bounds of a step that was recorded as it ran, without calls of blocks: at whatever peak a variant has.

The recorder of a step knows what each operator reads and makes, and when. Nobody has told it which values
blocks hold, so all that forward has made counts as made again wherever the schedule likes, and in backward an
operator holds what it reads while it runs. Both bounds are those of `lower_bound` and `autograd_bound`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from strategies.budget.planning.autograd_bound import AutogradBound, Backward, Request
from strategies.budget.planning.lower_bound import LowerBound
from strategies.budget.planning.recomputation import LeastFlops, Maker
from strategies.step.ledger import Ledger, is_on_device
from strategies.step.step_graph import OUTSIDE, StepGraph, StepOperator
from strategies.step.step_recorder import OperatorWork, RecordedOperator


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedStep:
    """A step of the plain model, in plain values, which can be written down.

    Fields:
        blocks: calls of blocks in its forward.
        phases, flops, starts, ends, reads, makes: those of its operators, in order of time; storages by
            number.
        sizes: bytes of each storage at the end of the step.
        births: phases in which storages were made; empty of what stood before the step.
        on_device: whether a storage lies on the device, private memory of kernels aside.
        changed, deltas: the storage whose size changes at each moment, and the bytes by which it grows.
    """

    blocks: int
    phases: tuple[str, ...]
    flops: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    makes: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    births: tuple[str, ...]
    on_device: tuple[bool, ...]
    changed: tuple[int, ...]
    deltas: tuple[int, ...]

    @classmethod
    def of(cls, operators: Sequence[RecordedOperator], ledger: Ledger, blocks: int) -> Self:
        """Return a step as it was recorded.

        Args:
            operators: its operators, in order of time.
            ledger: the lives of its storages.
            blocks: calls of blocks in its forward.
        """
        return cls(
            blocks=blocks,
            phases=tuple(each.work.phase for each in operators),
            flops=tuple(each.flops for each in operators),
            starts=tuple(each.start for each in operators),
            ends=tuple(each.end for each in operators),
            reads=tuple(tuple(sorted(each.reads)) for each in operators),
            makes=tuple(tuple(each.makes) for each in operators),
            sizes=tuple(life.nbytes for life in ledger.lives),
            births=tuple(life.phase for life in ledger.lives),
            on_device=tuple(map(is_on_device, ledger.lives)),
            changed=tuple(change.life for change in ledger.changes),
            deltas=tuple(change.delta for change in ledger.changes),
        )

    def least_flops(self, budget_bytes: int, host_bytes: int) -> LeastFlops:
        """Return the bounds of what any schedule of the step runs again.

        Args:
            budget_bytes: most bytes on the device.
            host_bytes: most bytes on the host.
        """
        nbytes, operators = self._largest(), self._operators()
        of_any = LowerBound(self._graph(operators, nbytes), blocks=self.blocks).cost(budget_bytes, host_bytes)
        of_autograd = AutogradBound(self._backward(operators, nbytes)).cost(budget_bytes, host_bytes)
        return LeastFlops(of_any, max(of_any, of_autograd))

    def _operators(self) -> list[StepOperator]:
        columns = self.phases, self.flops, self.starts, self.ends, self.reads, self.makes
        return [
            StepOperator(
                work=OperatorWork(phase=phase, name="", flops=flops),
                start=start,
                end=end,
                reads=frozenset(reads),
                writes=frozenset(),
                makes=dict.fromkeys(makes, 0),
                node="",
                call=OUTSIDE,
                ordinal=OUTSIDE,
                is_forward=phase != "backward",
                seconds=0.0,
                private_bytes=0,
                random_states=0,
                is_repeatable=True,
            )
            for phase, flops, start, end, reads, makes in zip(*columns, strict=True)
        ]

    def _graph(self, operators: Sequence[StepOperator], nbytes: Mapping[int, int]) -> StepGraph:
        changed = set(self.changed)
        storages = enumerate(zip(self.births, self.sizes, strict=True))
        return StepGraph(
            operators=operators,
            calls=(),
            nbytes=nbytes,
            deaths={},
            held_bytes=np.zeros(1, dtype=np.int64),
            gradients=frozenset(number for number, (phase, size) in storages if phase == "backward" and size),
            fixed_bytes=sum(size for number, size in nbytes.items() if number not in changed),
            device="",
        )

    def _backward(self, operators: Sequence[StepOperator], nbytes: Mapping[int, int]) -> Backward:
        """Return backward of the step, up to a second forward."""
        phases, moments = self.phases, len(self.changed)
        first = phases.index("backward") if "backward" in phases else len(phases)
        last = phases.index("forward", first) if "forward" in phases[first:] else len(phases)
        start = self.starts[first] if first < len(phases) else moments
        end = self.starts[last] if last < len(phases) else moments
        forward = {number for number in set(self.changed[:start]) if self.births[number]}
        made: dict[int, Maker] = {}
        for each in operators[:first]:
            maker = Maker(reads=each.reads & made.keys(), cost=each.flops)
            made |= dict.fromkeys(each.makes.keys() & forward, maker)
        return Backward(
            makers=made,
            nbytes=nbytes,
            requests=[
                Request(storage=storage, moment=each.start, until=each.end)
                for each in operators[first:last]
                for storage in each.reads & made.keys()
            ],
            deaths=dict.fromkeys(made, start - 1),
            held_bytes=self._held_bytes(forward)[: end + 1],
            start=start,
        )

    def _held_bytes(self, forward: set[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        counted = [is_counted and number not in forward for number, is_counted in enumerate(self.on_device)]
        changes = zip(self.changed, self.deltas, strict=True)
        deltas = [delta if counted[number] else 0 for number, delta in changes]
        now = sum(size for size, counts in zip(self.sizes, counted, strict=True) if counts)
        return np.cumsum([now - sum(deltas), *deltas], dtype=np.int64)

    def _largest(self) -> dict[int, int]:
        """Return the bytes of each storage at its largest, 0 of one that is not on the device."""
        running = list(self.sizes)
        largest = list(running)
        for number, delta in zip(reversed(self.changed), reversed(self.deltas), strict=True):
            running[number] -= delta
            largest[number] = max(largest[number], running[number])
        return {
            number: size if is_counted else 0
            for number, (size, is_counted) in enumerate(zip(largest, self.on_device, strict=True))
        }
