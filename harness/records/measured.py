"""What one rank measured: the result that it hands over as JSON.

Bytes are integers. FLOPs count multiply and add as two. Times are seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from harness.records.parity import Parity


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocator:
    """The allocator's own numbers of an uninstrumented step.

    Fields:
        source: which allocator, or which meter stands in for it.
        peak_requested_bytes: highest total of bytes asked for.
        peak_allocated_bytes: the same after rounding to blocks; `None` where there are no blocks.
        peak_reserved_bytes: highest total taken from the device; `None` where it is not known.
        workspace_bytes: requested beyond the peak of live storages: what kernels allocate privately.
        backend_bytes: peak of what the communication backend holds on threads of its own.
    """

    source: str
    peak_requested_bytes: int
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    workspace_bytes: int | None = None
    backend_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensor:
    """One storage alive between forward and backward.

    Fields:
        bytes: of the storage.
        op: operator that made it.
        module: FQN of the module in whose forward it was made.
        shape, dtype: of the first tensor on it.
    """

    bytes: int
    op: str
    module: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """A stay of the step in a module: the highest total of live storages on the device there."""

    bytes: int
    phase: str
    module: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNumbers:
    """The bytes of one instrumented step, by the definitions of the record."""

    saved_bytes: int
    peak_bytes: int
    activation_peak_bytes: int
    peak_phase: str
    peak_module: str
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    host_peak_bytes: int = 0
    allocator: Allocator | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredMemory(MemoryNumbers):
    """Fields: largest_saved: largest first; saved_by_module: bytes by module FQN; timeline: as it went."""

    largest_saved: tuple[SavedTensor, ...] = ()
    saved_by_module: dict[str, int] = field(default_factory=dict)
    timeline: tuple[Moment, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredWork:
    """What one instrumented step computed and communicated.

    Fields:
        forward_flops: forward and loss.
        backward_flops: everything in the backward phase, recomputation included.
        recomputed_flops: forward operators executed during backward.
        recomputed_ops: the same as counts by operator name.
        calls: forward calls by block FQN, recomputation included.
        collectives: phase to collective to count.
        collective_bytes: phase to collective to payload bytes.
    """

    forward_flops: int
    backward_flops: int
    recomputed_flops: int
    recomputed_ops: dict[str, int]
    calls: dict[str, int] = field(default_factory=dict)
    collectives: dict[str, dict[str, int]] = field(default_factory=dict)
    collective_bytes: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredBaseline:
    """The twin, measured the same way."""

    memory: MeasuredMemory
    work: MeasuredWork


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """What the strategy itself counted in the latest step.

    Fields:
        named: operators and groups that the configuration names.
        never_fired: those of `named` that no operator has matched.
        offloaded_bytes: bytes moved to host memory.
        chunks: chunk bodies executed.
        plan: what the strategy decided; `None` where it decides nothing.
        unneeded: why chunks had nothing to do, where that is as it should be.
    """

    named: tuple[str, ...] = ()
    never_fired: tuple[str, ...] = ()
    offloaded_bytes: int = 0
    chunks: int = 0
    plan: dict[str, Any] | None = None
    unneeded: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredTime:
    """Uninstrumented step times of one rank.

    Fields:
        variant_s, twin_s: seconds; equal indices were taken side by side, and on all ranks together.
        tokens_per_step: over all ranks.
        peak_flops_per_s: of one device; `None` where unknown, with its source otherwise.
        energy_j: joules a step that this rank's device used; `None` where the driver gives none.
    """

    variant_s: tuple[float, ...]
    twin_s: tuple[float, ...] = ()
    tokens_per_step: int | None = None
    peak_flops_per_s: float | None = None
    peak_flops_per_s_source: str | None = None
    energy_j: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankResult:
    """Everything that one rank reports about a trial that ended well."""

    rank: int
    local_rank: int
    memory: MeasuredMemory
    work: MeasuredWork
    observation: Observed = field(default_factory=Observed)
    baseline: MeasuredBaseline | None = None
    parity: Parity | None = None
    time: MeasuredTime | None = None
    environment: dict[str, Any] = field(default_factory=dict)
