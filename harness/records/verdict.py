"""The verdict of a trial: a function of what was measured, and of nothing else."""

from __future__ import annotations

from harness.records.merge_ranks import Memory, Work
from harness.records.parity_result import Parity

VERDICTS = ("neutral", "differs", "inert", "unverified")


def verdict(*, saves_nothing: bool, memory: Memory | None, work: Work | None, parity: Parity | None) -> str:
    """Return the verdict of a trial.

    Args:
        saves_nothing: neither AC nor chunking is enabled, or chunks alone that nothing needs; such a trial
            promises nothing and is never inert.
        memory, work, parity: `None` where the trial did not get so far. A trial that did not end well
            has none of them and is `unverified`.

    Returns:
        `differs`: variant and twin are not equal; it outranks everything, a wrong result is no result.
        `inert`: the strategy is enabled and did nothing that it promises.
        `unverified`: there was nothing to compare with.
        `neutral`: equal in all parts.
    """
    if parity is not None and not parity.is_equal:
        return "differs"
    if (
        not saves_nothing
        and memory is not None
        and work is not None
        and inert_because(memory, work) is not None
    ):
        return "inert"
    return "unverified" if parity is None else "neutral"


def inert_because(memory: Memory, work: Work) -> str | None:
    """Say why an enabled strategy counts as having done nothing; `None` when it did something."""
    if work.named and set(work.named) <= set(work.never_fired):
        return "none of the operators it names ever fired"
    moved = work.recomputed_ops or work.offloaded_bytes or work.chunks
    if not moved and memory.baseline is not None and memory.saved_bytes >= memory.baseline.saved_bytes:
        return "no byte saved, and nothing recomputed, offloaded or chunked"
    return None
