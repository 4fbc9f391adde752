"""What a strategy did in one step, to tell whether it does anything at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.records.measured import MeasuredWork
from harness.records.verdict import idle_because


@dataclass(frozen=True, kw_only=True, slots=True)
class Act:
    """What one instrumented step of a model did of what strategies promise.

    Fields:
        saved_bytes: bytes that forward left for backward.
        work: the work, with all that the model recomputes.
        observation: what the strategies themselves counted.
    """

    saved_bytes: int
    work: MeasuredWork
    observation: Any

    def is_idle(self, twin: Act) -> bool:
        """Say whether the strategy did nothing beyond what its `twin` did in the same step."""
        seen = self.observation
        moved = self.work.beyond(twin.work).recomputed_ops or seen.offloaded_bytes or seen.chunks
        saves = self.saved_bytes < twin.saved_bytes
        why = idle_because(named=seen.named, never_fired=seen.never_fired, has_acted=bool(moved) or saves)
        return why is not None and seen.unneeded is None
