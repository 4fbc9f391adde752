"""The protocol of a measurement: warm-up, parity steps, timed pairs, determinism, deadline."""

from __future__ import annotations

from dataclasses import dataclass

from harness.errors import require_at_least


@dataclass(frozen=True, kw_only=True, slots=True)
class Protocol:
    """The protocol of one trial; two trials are comparable only under the same one.

    Fields:
        name: how people call it.
        parity_steps: optimizer steps over which variant and twin are compared, at least 1.
        warmup_steps: untimed steps of each side before the timed ones.
        timed_pairs: timed steps of each side, taken A B B A; 0 measures no time. Fewer, 10 or more, where the
            ratio is known to one per cent before.
        deterministic: deterministic kernels during the parity steps.
        probes: after the parity steps the models are asked what steps in a row do not show: micro-batches in
            flight, recomputed values, leaks.
        deadline_s: wall-clock limit of the whole trial in seconds.
    """

    name: str = "standard"
    parity_steps: int = 3
    warmup_steps: int = 3
    timed_pairs: int = 20
    deterministic: bool = True
    deadline_s: float = 600.0
    probes: bool = False

    def __post_init__(self) -> None:
        require_at_least("protocol.parity_steps", self.parity_steps, 1)
        require_at_least("protocol.warmup_steps", self.warmup_steps, 0)
        require_at_least("protocol.timed_pairs", self.timed_pairs, 0)
        require_at_least("protocol.deadline_s", self.deadline_s, 1)
