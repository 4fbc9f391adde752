"""The probe of operators' private memory where the counting allocator is."""

from __future__ import annotations

from harness.measure.memory.counting_allocator import CountingAllocator


class CpuWorkspaceProbe:
    """Tells an operator's private memory from the counting allocator; see `WorkspaceProbe`."""

    def __init__(self, allocator: CountingAllocator) -> None:
        self._allocator = allocator
        self._before_bytes = 0

    def begin(self) -> None:
        """Start to watch."""
        self._allocator.reset_window()
        self._before_bytes = self._allocator.read().live_bytes

    def excess_bytes(self) -> int:
        """Return the bytes that were live above both what was there at `begin` and what is there now."""
        counts = self._allocator.read()
        return counts.window_peak_bytes - max(self._before_bytes, counts.live_bytes)
