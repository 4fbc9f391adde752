"""What the step of one rank does: operators, collectives and host copies, with their sizes.

Equal calls are one, with a count, in the order of the first of them. Bytes are integers; a multiplication and
an addition are two FLOPs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorCall:
    """An operator that computes or moves; views and allocations are left out.

    Fields:
        phase: `forward`, `backward` or `optimizer`.
        name: name and overload, `aten.mm.default`.
        is_recomputed: a forward operator of the backward pass.
        dtype: dtype of the first tensor that it is given, or else makes.
        flops: those of one call.
        outer_sizes: those of a matrix product, attention or convolution; none of other operators.
        read_bytes, written_bytes: distinct elements of operands and results of one call, in bytes.
        count: number of equal calls.
    """

    phase: str
    name: str
    is_recomputed: bool
    dtype: str
    flops: int
    read_bytes: int
    written_bytes: int
    outer_sizes: tuple[int, ...] = ()
    count: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveCall:
    """A collective.

    Fields:
        phase: `forward`, `backward` or `optimizer`.
        name: its name in records, such as `all_gather`.
        payload_bytes: the larger of what one call takes and gives on this rank.
        group_size: ranks that take part.
        furthest_rank: highest rank that takes part; this one is rank 0.
        crosses_nodes: whether the ranks of the group are on several nodes.
        is_waited: computation waits for it, as tensor parallelism does; FSDP and DDP communicate beside it.
        is_recomputed: it is repeated by a recomputation.
        count: number of equal calls.
    """

    phase: str
    name: str
    payload_bytes: int
    group_size: int
    furthest_rank: int
    crosses_nodes: bool
    is_waited: bool
    is_recomputed: bool = False
    count: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCopy:
    """A copy between device and host memory.

    Fields:
        phase: `forward`, `backward` or `optimizer`.
        direction: `to_host` or `to_device`.
        nbytes: bytes of one copy.
        count: number of equal copies.
    """

    phase: str
    direction: str
    nbytes: int
    count: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyCall:
    """A call of Python that is asked about an operator of a region.

    Fields:
        phase: `forward`, `backward` or `optimizer`.
        count: number of such calls.
    """

    phase: str
    count: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """The step of one rank.

    Fields:
        device: type of the device that computes.
        computes_in: dtype of most matrix multiplications.
        operators, collectives, host_copies: what the step does.
        policy_calls: what it asks about operators meanwhile.
    """

    device: str
    computes_in: str
    operators: tuple[OperatorCall, ...]
    collectives: tuple[CollectiveCall, ...] = ()
    host_copies: tuple[HostCopy, ...] = ()
    policy_calls: tuple[PolicyCall, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """How long a step is expected to take.

    Fields:
        step_s: seconds of one step.
        peak_flops_per_s: peak rate of one device in the model's dtype, for MFU and HFU; `None` if unknown.
        source: where the rate is from.
    """

    step_s: float
    peak_flops_per_s: float | None = None
    source: str | None = None
