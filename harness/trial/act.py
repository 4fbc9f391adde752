"""Acts of a strategy in one step, to tell whether it does anything at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.records.measured import MeasuredMemory, MeasuredWork
from harness.records.verdict import freed_nothing, idle_because


@dataclass(frozen=True, kw_only=True, slots=True)
class Act:
    """The acts of one instrumented step that strategies promise.

    Fields:
        work: the work, with all that the model recomputes.
        observation: what the strategies themselves counted.
    """

    memory: MeasuredMemory
    work: MeasuredWork
    observation: Any

    def is_idle(self, twin: Act) -> bool:
        """Say whether the strategy did nothing beyond what its `twin` did in the same step."""
        seen = self.observation
        moved = self.work.beyond(twin.work).recomputed_ops or seen.offloaded_bytes or seen.chunks
        why = idle_because(
            named=seen.named,
            never_fired=seen.never_fired,
            has_acted=bool(moved),
            freed_nothing=freed_nothing(self.memory, twin.memory),
        )
        return why is not None and seen.unneeded is None
