"""The bounds of a step that was recorded as it ran, without calls of blocks: at whatever peak a variant has.

The recorder of a step knows what each operator reads and makes, and when. Nobody has told it which values
blocks hold, so all that forward has made counts as made again wherever the schedule likes, and in backward an
operator holds what it reads while it runs. Both bounds are those of `lower_bound` and `autograd_bound`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from strategies.budget.planning.autograd_bound import AutogradBound, Backward, Request
from strategies.budget.planning.lower_bound import LowerBound
from strategies.budget.planning.recomputation import LeastFlops, Maker
from strategies.step.ledger import Ledger, is_on_device
from strategies.step.step_graph import OUTSIDE, StepGraph, StepOperator
from strategies.step.step_recorder import RecordedOperator


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedStep:
    """A step of the plain model.

    Fields:
        operators: its operators, in order of time.
        ledger: the lives of its storages.
        blocks: calls of blocks in its forward.
    """

    operators: Sequence[RecordedOperator]
    ledger: Ledger
    blocks: int

    def least_flops(self, budget_bytes: int, host_bytes: int) -> LeastFlops:
        """Return the bounds of what any schedule of the step runs again.

        Args:
            budget_bytes: most bytes on the device.
            host_bytes: most bytes on the host.
        """
        nbytes = _largest(self.ledger)
        of_any = LowerBound(self._graph(nbytes), blocks=self.blocks).cost(budget_bytes, host_bytes)
        of_autograd = AutogradBound(self._backward(nbytes)).cost(budget_bytes, host_bytes)
        return LeastFlops(of_any, max(of_any, of_autograd))

    def _graph(self, nbytes: Mapping[int, int]) -> StepGraph:
        lives, changed = self.ledger.lives, {change.life for change in self.ledger.changes}
        return StepGraph(
            operators=[
                StepOperator(
                    work=each.work,
                    start=each.start,
                    end=each.end,
                    reads=each.reads,
                    writes=each.writes,
                    makes=each.makes,
                    node=each.node,
                    call=OUTSIDE,
                    ordinal=OUTSIDE,
                    is_forward=each.work.phase != "backward",
                    seconds=0.0,
                    private_bytes=0,
                    random_states=0,
                    is_repeatable=True,
                )
                for each in self.operators
            ],
            calls=(),
            nbytes=nbytes,
            deaths={},
            held_bytes=np.zeros(1, dtype=np.int64),
            gradients=frozenset(
                number for number, life in enumerate(lives) if life.phase == "backward" and life.nbytes
            ),
            fixed_bytes=sum(nbytes[number] for number in range(len(lives)) if number not in changed),
            device="",
        )

    def _backward(self, nbytes: Mapping[int, int]) -> Backward:
        """Return backward of the step, up to a second forward."""
        phases = [each.work.phase for each in self.operators]
        first = phases.index("backward") if "backward" in phases else len(phases)
        last = phases.index("forward", first) if "forward" in phases[first:] else len(phases)
        start = self.operators[first].start if first < len(phases) else self.ledger.moment
        end = self.operators[last].start if last < len(phases) else self.ledger.moment
        born = {change.life for change in self.ledger.changes[:start]}
        forward = {number for number in born if self.ledger.lives[number].phase}
        made: dict[int, Maker] = {}
        for each in self.operators[:first]:
            maker = Maker(reads=each.reads & made.keys(), cost=each.flops)
            made |= dict.fromkeys(each.makes.keys() & forward, maker)
        return Backward(
            makers=made,
            nbytes=nbytes,
            requests=[
                Request(storage=storage, moment=each.start, until=each.end)
                for each in self.operators[first:last]
                for storage in each.reads & made.keys()
            ],
            deaths=dict.fromkeys(made, start - 1),
            held_bytes=self._held_bytes(forward)[: end + 1],
            start=start,
        )

    def _held_bytes(self, forward: set[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        counted = [
            is_on_device(life) and number not in forward for number, life in enumerate(self.ledger.lives)
        ]
        deltas = [change.delta if counted[change.life] else 0 for change in self.ledger.changes]
        now = sum(life.nbytes for life, counts in zip(self.ledger.lives, counted, strict=True) if counts)
        return np.cumsum([now - sum(deltas), *deltas], dtype=np.int64)


def _largest(ledger: Ledger) -> dict[int, int]:
    """Return the bytes of each storage at its largest, 0 of one that is not on the device."""
    running = {number: life.nbytes for number, life in enumerate(ledger.lives)}
    largest = dict(running)
    for change in reversed(ledger.changes):
        running[change.life] -= change.delta
        largest[change.life] = max(largest[change.life], running[change.life])
    return {number: size if is_on_device(ledger.lives[number]) else 0 for number, size in largest.items()}
