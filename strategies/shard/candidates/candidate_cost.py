"""Cost of a candidate in seconds: FLOPs over a rate, and a latency and a bandwidth for every collective."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strategies.estimate.machine import Machine

if TYPE_CHECKING:
    from strategies.shard.candidates.redistribution import Collective


def communication_s(machine: Machine, collectives: Iterable[Collective]) -> float:
    """Return the seconds of `collectives`, one after another.

    Each takes `latency + (n-1)/n * bytes / bandwidth`, the second term twice to all-reduce.
    """
    return sum((machine.collective_s(each.link_bytes) for each in collectives), 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateCost:
    """The cost of a candidate for one rank in a training step, forward and backward.

    Fields:
        memory_bytes: local parts of all operands, the output included, gradients not.
        communication_s: seconds of the collectives; nothing overlaps.
    """

    forward_flops: int
    backward_flops: int
    communicated_bytes: int
    memory_bytes: int
    compute_s: float
    communication_s: float

    @property
    def total_s(self) -> float:
        """Seconds of compute and communication, one after the other."""
        return self.compute_s + self.communication_s
