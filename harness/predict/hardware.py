"""Hardware that a prediction is made for: what fits its memory, and how fast it computes and communicates.

It is an option of the command and no part of an experiment: the same trial is predicted for any hardware.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isfinite

from harness.errors import ConfigError, require_at_least, require_one_of
from harness.records.measured import MemoryNumbers
from strategies.estimate import machine

_GIB = 1 << 30
_POSITIVE = (
    "usable_gib",
    "bytes_per_s",
    "link_bytes_per_s",
    "network_bytes_per_s",
    "host_bytes_per_s",
    "attention_share",
    "efficiency",
)
_SHARES = ("attention_share", "efficiency")
_DELAYS = ("launch_s", "policy_s", "half_rows", "latency_s", "network_latency_s")
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """A node of equal devices, and the network between nodes.

    Fields:
        device: `cuda` or `cpu`; decides which kernels a prediction would have to follow.
        usable_gib: GiB that the storages of one rank may take, > 0; what CUDA and NCCL keep is no part of it.
        flops_per_s: peak FLOP/s of matrix multiplications of one device, by dtype (`fp32`, `bf16`, `fp16`).
        bytes_per_s: memory bandwidth of one device, > 0.
        launch_s: seconds that an operator takes at least, >= 0.
        policy_s: seconds that a CPU takes to ask Python about an operator of a selective region, >= 0; a GPU
            computes while its host does, and is not slowed by them here.
        half_rows: rows at which a matrix multiplication reaches half of its speed, >= 0.
        ranks_per_node: devices of a node, >= 1; ranks beyond them communicate over the network.
        link_bytes_per_s: bytes a second that a device sends and receives at once within a node, > 0.
        latency_s: seconds that a collective within a node takes at least, >= 0.
        network_bytes_per_s: the same between nodes, for each device, > 0.
        network_latency_s: the same between nodes, >= 0.
        host_bytes_per_s: bytes a second between one device and host memory, each direction, > 0.
        attention_share: share of the rate of matrix multiplications that fused attention reaches, in (0, 1].
        functions_per_s: elements of gelu a second, > 0; `None` where memory limits such operators.
        efficiency: share of these peaks that large kernels and collectives reach, in (0, 1].
        sources: where the numbers come from, by field.

    Raises:
        ConfigError: a number that is out of range.
    """

    name: str
    device: str
    usable_gib: float
    flops_per_s: dict[str, float]
    bytes_per_s: float
    launch_s: float
    half_rows: float
    ranks_per_node: int
    link_bytes_per_s: float
    latency_s: float
    network_bytes_per_s: float
    network_latency_s: float
    host_bytes_per_s: float
    policy_s: float = 0.0
    attention_share: float = 1.0
    functions_per_s: float | None = None
    efficiency: float = 1.0
    sources: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse numbers that no hardware has."""
        require_one_of("hardware.device", self.device, ("cuda", "cpu"))
        require_at_least("hardware.ranks_per_node", self.ranks_per_node, 1)
        for where, value in self._rates():
            if not (value > 0 and isfinite(value)):
                raise ConfigError(f"hardware.{where}", f"must be above 0 and finite, got {value}")
        for name in _DELAYS:
            require_at_least(f"hardware.{name}", getattr(self, name), 0)
        for name in _SHARES:
            if getattr(self, name) > 1:
                raise ConfigError(f"hardware.{name}", f"must be at most 1, got {getattr(self, name)}")

    @property
    def usable_bytes(self) -> int:
        """Bytes that the storages of one rank may take."""
        return int(min(self.usable_gib * _GIB, sys.maxsize))

    def needed_bytes(self, memory: MemoryNumbers) -> int:
        """Return the bytes that a step needs here; on a CPU, host memory is the same memory."""
        return memory.peak_bytes + (memory.host_peak_bytes if self.device == "cpu" else 0)

    def rate(self, dtype: str) -> float:
        """Return the peak FLOP/s in `dtype`, as torch names it (`bfloat16`).

        Raises:
            ConfigError: the hardware has no rate for it.
        """
        known = _DTYPES.get(dtype, dtype)
        if known not in self.flops_per_s:
            rates = ", ".join(sorted(self.flops_per_s))
            raise ConfigError(
                f"hardware.flops_per_s.{known}",
                f"{self.name} has no rate for {dtype}, in which operators of this point compute; "
                f"give one, or choose a dtype that has: {rates}",
            )
        return self.flops_per_s[known]

    def machine(self, dtype: str, *, leaves_node: bool = False) -> machine.Machine:
        """Return the machine that one rank is, at the rates that are reached.

        Args:
            dtype: dtype that matrices are multiplied in, as torch names it.
            leaves_node: whether its collectives go over the network.

        Raises:
            ConfigError: the hardware has no rate for `dtype`.
        """
        link = self.network_bytes_per_s if leaves_node else self.link_bytes_per_s
        return machine.Machine(
            flops_per_s=self.rate(dtype) * self.efficiency,
            bytes_per_s=self.bytes_per_s * self.efficiency,
            launch_s=self.launch_s,
            half_rows=self.half_rows,
            link_bytes_per_s=link * self.efficiency,
            latency_s=self.network_latency_s if leaves_node else self.latency_s,
            host_bytes_per_s=self.host_bytes_per_s * self.efficiency,
            is_asynchronous=self.device == "cuda",
            element_s=self._element_s(),
        )

    def _element_s(self) -> dict[str, float]:
        """Return the seconds of elements of slow operators, as many times those of gelu as elsewhere."""
        if self.functions_per_s is None:
            return {}
        of_gelu = 1 / self.functions_per_s
        return {
            name: of_gelu * (seconds / machine.ELEMENT_S["gelu"])
            for name, seconds in machine.ELEMENT_S.items()
        }

    def host_s(self, moved_bytes: int) -> float:
        """Return the seconds of copies between a device and host memory."""
        return moved_bytes / (self.host_bytes_per_s * self.efficiency)

    def _rates(self) -> Iterator[tuple[str, float]]:
        yield from ((name, getattr(self, name)) for name in _POSITIVE)
        if self.functions_per_s is not None:
            yield "functions_per_s", self.functions_per_s
        yield from ((f"flops_per_s.{dtype}", rate) for dtype, rate in self.flops_per_s.items())
