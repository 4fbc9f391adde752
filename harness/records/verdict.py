"""The verdict of a trial: a function of what was measured, and of nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from harness.records.merge_ranks import Memory, Work
from harness.records.parity_result import Parity
from harness.records.probed import Probed

VERDICTS = ("neutral", "differs", "inert", "unverified")


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The verdict of a trial.

    Fields:
        word: one of `VERDICTS`.
        reason: why it is not `neutral`; `None` where it is, and where nothing was compared.
    """

    word: str
    reason: str | None = None


def verdict(
    *,
    saves_nothing: bool,
    is_compiled: bool = False,
    memory: Memory | None,
    work: Work | None,
    parity: Parity | None,
    probed: Probed | None = None,
) -> Verdict:
    """Return the verdict of a trial.

    Args:
        saves_nothing: neither AC nor chunking is enabled, or chunks alone that nothing needs; such a trial
            promises nothing and is never inert.
        is_compiled: a compiler is asked for, which promises at least one graph.
        memory, work, parity, probed: `None` where the trial did not get so far. A trial that did not end well
            has none of them and is `unverified`.

    Returns:
        `differs`: variant and twin are not equal, or a probe tells them apart, although the plain model
            repeats itself; or a recomputation sends tokens to other experts. It outranks everything, a wrong
            result is no result.
        `unverified`: the plain model was seen not to repeat itself, there was nothing to compare with, or
            what was compared proves nothing; the first outranks `inert`, which chance may make of it.
        `inert`: the strategy is enabled and did nothing that it promises, whatever the random numbers: it
            freed nothing, neither of the saved bytes nor of the peak.
        `neutral`: equal in all parts.
    """
    seen = _flipped(work) or _different(parity, probed)
    if seen is not None:
        return seen
    if is_compiled and work is not None and not work.compiled_graphs:
        return Verdict(word="inert", reason=_uncompiled(work))
    idle = None if saves_nothing or memory is None or work is None else inert_because(memory, work)
    if idle is not None:
        return Verdict(word="inert", reason=idle)
    if parity is None:
        return Verdict(word="unverified")  # the note says why there was nothing to compare with
    unproven = parity.unproven or (probed and probed.unproven)
    if unproven:
        return Verdict(word="unverified", reason=unproven)
    return Verdict(word="neutral")


def _uncompiled(work: Work) -> str:
    reason = next(iter(work.graph_breaks), None)
    return "nothing was compiled" if reason is None else f"nothing was compiled: {reason}"


def _flipped(work: Work | None) -> Verdict | None:
    """Return what it means that a recomputation chose other experts, whatever that has done to gradients."""
    flips = (each.flip for each in (() if work is None else work.routing))
    flip = next(filter(None, flips), None)
    return None if flip is None else Verdict(word="differs", reason=f"routing: {flip}")


def _different(parity: Parity | None, probed: Probed | None) -> Verdict | None:
    """Return what it means that something differs; `None` where nothing does."""
    if parity is not None and any(link.blamed for link in parity.links):
        return Verdict(word="differs", reason=next(parity.differences(), None))
    unrepeated = None if parity is None else parity.unrepeated
    if unrepeated is not None:
        return Verdict(word="unverified", reason=unrepeated)
    found = None if probed is None else probed.differs
    return None if found is None else Verdict(word="differs", reason=found)


def inert_because(memory: Memory, work: Work) -> str | None:
    """Say why an enabled strategy counts as having done nothing; `None` when it did something."""
    if work.acted_otherwise:
        return None
    reason = idle_because(
        named=work.named,
        never_fired=work.never_fired,
        has_acted=bool(work.recomputed_ops or work.offloaded_bytes or work.chunks),
        freed_nothing=None if memory.baseline is None else freed_nothing(memory, memory.baseline),
    )
    return None if reason is None else f"{reason}{_uncalled(work)}"


class Held(Protocol):
    """The bytes of a step, as of `MemoryNumbers`."""

    @property
    def saved_bytes(self) -> int:
        """Bytes that forward left for backward."""

    @property
    def peak_bytes(self) -> int:
        """Most bytes at one time."""

    @property
    def random_state_bytes(self) -> int:
        """Bytes of stashed states of random generators."""


def freed_nothing(variant: Held, twin: Held) -> str | None:
    """Say that neither saved bytes nor peak of a variant are below its twin's; `None` where one is.

    Stashed states of random generators are no part of the saved bytes here: each region has one, of 5,056
    bytes on a CPU, whatever the size of the model.
    """
    one, other = (each.saved_bytes - each.random_state_bytes for each in (variant, twin))
    if one < other or variant.peak_bytes < twin.peak_bytes:
        return None
    saved = f"{variant.saved_bytes:,} saved bytes, {twin.saved_bytes:,} without it"
    return f"frees nothing: {saved}; peak {variant.peak_bytes:,} bytes, {twin.peak_bytes:,} without it"


def _uncalled(work: Work) -> str:
    """Say which blocks forward does not call as modules, and what to do; nothing where it calls each."""
    names = [name for name, count in work.calls.items() if count == 0]
    if not names:
        return ""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    options = "model.layers_fqn, ac.module_classes or ac.labels"
    return f": forward does not call {names[0]!r}{more}; name modules that it calls by {options}"


def idle_because(
    *, named: Iterable[str], never_fired: Iterable[str], has_acted: bool, freed_nothing: str | None
) -> str | None:
    """Say why an enabled strategy has done nothing in one step; `None` when it did something.

    Args:
        named, never_fired: operators that it names, and those of them that never fired.
        has_acted: it recomputed, offloaded or chunked.
        freed_nothing: says so where it has freed no byte of its twin's.
    """
    if set(named) and set(named) <= set(never_fired):
        return "none of the operators it names ever fired"
    if freed_nothing is None or has_acted:
        return freed_nothing
    return "no byte saved, and nothing recomputed, offloaded or chunked"
