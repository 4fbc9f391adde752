"""`acbench --dry-run` is asked about a batch of 8 and of 1,048,576 samples of 128 tokens.

It drew the whole batch in memory to answer "would run".
"""

from __future__ import annotations

from resource import RUSAGE_CHILDREN, getrusage

from tests.gallery.outside._commands import acbench

BEFORE = "2 GiB more for the large batch"
RIGHT = "0 GiB more for the large batch"

_KIB_A_GIB = 1 << 20


def answer() -> str:
    """Return how much more memory the large batch takes than the small one."""
    peaks = []
    for batch_size in (8, 1 << 20):
        acbench("--dry-run", "model=mlp", f"batch_size={batch_size}")
        peaks.append(getrusage(RUSAGE_CHILDREN).ru_maxrss)
    return f"{(peaks[1] - peaks[0]) / _KIB_A_GIB:.0f} GiB more for the large batch"
