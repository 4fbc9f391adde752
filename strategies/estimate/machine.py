"""The model of time: how fast the device of one rank computes, reads memory, and exchanges bytes.

Plans of chunks, candidates of sharding and predictions all count seconds with it. Plans follow from ratios of
its numbers only, and must be the same on every rank and in every process: so the machines below are fixed
and not measured. Predictions take the numbers of named hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isfinite

from strategies.base import StrategyError

_RATES = ("flops_per_s", "bytes_per_s", "link_bytes_per_s", "host_bytes_per_s")
_DELAYS = ("launch_s", "half_rows", "latency_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The speed of one rank.

    Fields:
        flops_per_s: FLOPs of matrix multiplications in a second, > 0.
        bytes_per_s: memory bandwidth, > 0.
        launch_s: seconds that each operator takes at least, >= 0.
        half_rows: rows at which a matrix multiplication reaches half of its speed, >= 0.
        link_bytes_per_s: bytes a second that a rank sends and receives at once, > 0.
        latency_s: seconds that a collective takes however small, >= 0.
        host_bytes_per_s: bytes a second between the device and host memory, each direction, > 0.
        is_asynchronous: whether operators run while Python does, and copies to the host while operators do.
        element_s: seconds of an element, by name, of operators that compute more slowly than they move bytes.

    Raises:
        StrategyError: a number that is out of range.
    """

    flops_per_s: float
    bytes_per_s: float
    launch_s: float
    half_rows: float
    link_bytes_per_s: float
    latency_s: float
    host_bytes_per_s: float
    is_asynchronous: bool = True
    element_s: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Refuse rates that are not above 0 and delays below 0."""
        for name in _RATES:
            value = getattr(self, name)
            if not (value > 0 and isfinite(value)):
                raise StrategyError(f"machine.{name}", f"must be positive and finite, got {value}")
        for name in _DELAYS:
            value = getattr(self, name)
            if not (value >= 0 and isfinite(value)):
                raise StrategyError(f"machine.{name}", f"must be at least 0 and finite, got {value}")

    def compute_s(self, flops: int) -> float:
        """Return the seconds that `flops` take."""
        return flops / self.flops_per_s

    def flops_in(self, seconds: float) -> int:
        """Return the FLOPs of matrix multiplications that `seconds` are worth."""
        return round(seconds * self.flops_per_s)

    def operator_s(
        self, flops: float, moved_bytes: float, rows: float = 0, *, name: str = "", elements: float = 0
    ) -> float:
        """Return the seconds of one operator: a roofline, and the launch.

        Args:
            moved_bytes: bytes that it reads and writes.
            rows: smallest outer size of a matrix multiplication; 0 where that limits nothing.
            name: its name without namespace and overload, `tanh`.
            elements: elements of its operands or of its results, whichever are more.
        """
        speed = self.flops_per_s * (rows / (rows + self.half_rows) if rows else 1.0)
        computed_s = self.element_s.get(name, 0.0) * elements
        return max(flops / speed, moved_bytes / self.bytes_per_s, computed_s) + self.launch_s

    def offload_s(self, moved_bytes: int, window_s: float) -> float:
        """Return the seconds that a step waits for values that go to the host and come back when asked for.

        Args:
            moved_bytes: bytes of the values, each way.
            window_s: seconds of operators during which the copies to the host run, where they can.
        """
        each_way_s = moved_bytes / self.host_bytes_per_s
        return self.not_hidden_s(each_way_s, window_s) + each_way_s

    def not_hidden_s(self, seconds: float, window_s: float) -> float:
        """Return the seconds that a step waits for what runs beside operators, where the device lets it.

        Args:
            seconds: seconds of Python code, or of copies.
            window_s: seconds of the operators beside which it can run.
        """
        return max(0.0, seconds - window_s) if self.is_asynchronous else seconds

    def collective_s(self, link_bytes: float) -> float:
        """Return the seconds of one collective: the latency, and `link_bytes` that a rank sends."""
        return self.latency_s + link_bytes / self.link_bytes_per_s


_OF_ELEMENT_NS = {
    0.45: "gelu",
    0.8: "cumprod cumsum exp log1p",
    1.2: "argmax cos elu erf expm1 gather index log logsumexp masked_fill sin",
    1.6: "avg_pool2d avg_pool2d_backward softplus tan",
    2.0: "log_sigmoid_forward mish_backward native_batch_norm",
    2.5: "atan tanh topk",
    3.5: "mish rand rand_like randn randn_like upsample_bilinear2d upsample_nearest2d",
    5.5: "bernoulli max_pool2d_with_indices native_dropout var",
    11.0: "sort",
}
ELEMENT_S: Mapping[str, float] = {
    name: ns * 1e-9 for ns, names in _OF_ELEMENT_NS.items() for name in names.split()
}
"""Seconds of an element on one core of a server processor, of operators that move bytes far more slowly.

Measured on 2 MiB of float32, of an AMD EPYC with torch 2.13; ratios between them are what plans follow.
"""

PYTHON_S: Mapping[str, float] = {"asked": 6.28e-6, "taped": 5e-5, "again": 2.8e-5, "region": 4e-4}
"""Seconds of Python code, on such a core, that checkpointing adds to operators.

To ask a selective policy about one; to follow one with a tape, in forward and backward; to run one again in a
block's code, without the operator; and to enter and leave a region that runs again.
"""

MACHINES: Mapping[str, Machine] = {
    "cpu": Machine(
        flops_per_s=1.0e11,
        bytes_per_s=1.8e10,
        launch_s=8e-6,
        half_rows=6,
        link_bytes_per_s=1.0e9,
        latency_s=100e-6,
        host_bytes_per_s=9.0e9,
        is_asynchronous=False,
        element_s=ELEMENT_S,
    ),
    "cuda": Machine(
        flops_per_s=3.0e14,
        bytes_per_s=2.5e12,
        launch_s=6e-6,
        half_rows=64,
        link_bytes_per_s=300e9,
        latency_s=10e-6,
        host_bytes_per_s=32e9,
    ),
}
"""One core of a server processor that talks to others through gloo, and a data-centre GPU with NVLink.

Host copies of the processor read and write its own memory; the GPU's go over PCIe 4.0 x16.
"""

A100 = replace(MACHINES["cuda"], flops_per_s=312e12)
"""What sharding is chosen for: 312 TFLOP/s dense bf16, 300 GB/s in each direction (NVIDIA A100 datasheet)."""
