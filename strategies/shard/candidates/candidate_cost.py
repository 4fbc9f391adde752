"""Cost of a candidate in seconds: FLOPs over a rate, and a latency and a bandwidth for every collective."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

from strategies.errors import StrategyError

if TYPE_CHECKING:
    from strategies.shard.candidates.redistribution import Collective


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """What a rank computes and what a link between ranks carries.

    The defaults are an A100 SXM with NVLink: 312 TFLOP/s dense bf16, 300 GB/s in each direction
    (NVIDIA A100 datasheet), and 10 µs to launch and meet. They rank candidates; for predictions
    give your own.

    Fields:
        flops_per_s: FLOPs a second of one rank, > 0.
        bandwidth_bytes_per_s: bytes a second that a rank sends and receives at once, > 0.
        latency_s: seconds a collective takes however small, >= 0.
    """

    flops_per_s: float = 312e12
    bandwidth_bytes_per_s: float = 300e9
    latency_s: float = 10e-6

    def __post_init__(self) -> None:
        for name in ("flops_per_s", "bandwidth_bytes_per_s"):
            value = getattr(self, name)
            if not (value > 0 and isfinite(value)):
                raise StrategyError(f"hardware.{name}", f"must be positive and finite, got {value}")
        if not (self.latency_s >= 0 and isfinite(self.latency_s)):
            raise StrategyError("hardware.latency_s", f"must be at least 0 and finite, got {self.latency_s}")

    def compute_s(self, flops: int) -> float:
        """Return the seconds that `flops` take on one rank."""
        return flops / self.flops_per_s

    def collective_s(self, collective: Collective) -> float:
        """Return `latency + (n-1)/n * bytes / bandwidth` seconds, the second term twice to all-reduce."""
        return self.latency_s + collective.link_bytes / self.bandwidth_bytes_per_s

    def communication_s(self, collectives: Iterable[Collective]) -> float:
        """Return the seconds of `collectives`, one after another."""
        return sum(map(self.collective_s, collectives), 0.0)


DEFAULT_HARDWARE = Hardware()


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateCost:
    """What a candidate costs one rank in a training step, forward and backward.

    Fields:
        forward_flops: FLOPs forward.
        backward_flops: FLOPs backward.
        communicated_bytes: payload of all collectives.
        memory_bytes: local parts of all operands, the output included, gradients not.
        compute_s: seconds of the FLOPs.
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
