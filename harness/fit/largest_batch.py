"""The largest batch that fits, by a line through the steps of two batches where bytes are on one."""

from __future__ import annotations

from collections.abc import Callable

from harness.records.measured import MeasuredMemory

_MOST = 1 << 20
_PATIENCE = 4
"""Further batches that are traced, as long as bytes are on no line."""


def largest_batch(
    memory: MeasuredMemory, batch_size: int, limit_bytes: int, unit: int, memory_of: Callable[[int], int]
) -> int:
    """Return the largest batch whose step fits; 0 where not even the smallest does.

    The bytes of a step are what stands, and activations that grow with the batch. So the first guess needs
    no other step; the one that is traced there says whether bytes are on the line, or which line they are on.

    Args:
        memory: bytes of the step with `batch_size`.
        limit_bytes: what a step may need.
        unit: what every batch is a multiple of: ranks that share it.
        memory_of: returns the bytes of the step with another batch.
    """
    grown = memory.activation_peak_bytes / batch_size
    known = {batch_size: memory.peak_bytes}
    standing = memory.peak_bytes - memory.activation_peak_bytes
    guess = _whole((limit_bytes - standing) / grown if grown else _MOST, unit)
    for _ in range(_PATIENCE):
        if guess in known:
            break
        on_line = standing + grown * guess
        known[guess] = memory_of(guess)
        if known[guess] == on_line:
            break  # a third point of one line: the next batch is on it too
        near, far = sorted(known, key=lambda size: abs(known[size] - limit_bytes))[:2]
        grown = (known[near] - known[far]) / (near - far)
        if grown <= 0:
            break
        standing = int(known[near] - grown * near)
        guess = _whole((limit_bytes - standing) / grown, unit)
    return max((size for size, needed in known.items() if needed <= limit_bytes), default=0)


def _whole(size: float, unit: int) -> int:
    """Return the largest batch up to `size` that ranks can share; at least the smallest."""
    return max(unit, min(_MOST, int(size)) // unit * unit)
