"""Findings of the probes of a trial or a check, torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.records.parity_result import joined


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The finding of one probe.

    Fields:
        probe: the probe: `between`, `leak`, `input_dependence` or `finite_differences`.
        verdict: `differs` or `unverified`.
        part: what differs: a key of `PARTS`, `hides_error`, `recomputation` or `leak`; empty where nothing
            does.
        index: position in the rank's local tensor; None when something else than a value differs.
        expected, actual: the plain model's and the variant's value, or a description of them.
    """

    probe: str
    verdict: str
    reason: str
    part: str = ""
    name: str = ""
    rank: int = 0
    step: int = 0
    index: tuple[int, ...] | None = None
    expected: float | str = ""
    actual: float | str = ""

    @property
    def first(self) -> dict[str, Any] | None:
        """The difference alone; `None` where nothing differs."""
        if not self.part:
            return None
        keys = ("probe", "part", "name", "rank", "step", "index", "expected", "actual")
        return {key: getattr(self, key) for key in keys}


@dataclass(frozen=True, kw_only=True, slots=True)
class Probed:
    """The questions and findings of the probes of a trial.

    Fields:
        asked: names of the probes that ran, in order.
        finding: what the first of them found; `None` where all found the variant as the plain model.
        recomputation: the first recomputed value that forward did not make, in words; empty where all were.
        cause: what a difference looks like, and what to do; empty where nothing known does.
        late_reads: state that the recomputation reads besides its inputs, and that nothing changes before it
            does; a change of it would make wrong gradients.
        notes: sentences on what was not asked, and why.
    """

    asked: tuple[str, ...] = ()
    finding: Finding | None = None
    recomputation: str = ""
    cause: str = ""
    late_reads: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def differs(self) -> str | None:
        """Why the variant is not the plain model."""
        return self.finding.reason if self.finding is not None and self.finding.verdict == "differs" else None

    @property
    def unproven(self) -> str | None:
        """Why equality proves nothing."""
        is_open = self.finding is not None and self.finding.verdict == "unverified"
        return self.finding.reason if self.finding is not None and is_open else None


def merge_probed(ranks: Sequence[Probed]) -> Probed | None:
    """Return what several ranks found as one: what differs on one rank differs; `None` of no rank."""
    if not ranks:
        return None
    findings = sorted(
        (rank.finding for rank in ranks if rank.finding is not None),
        key=lambda finding: finding.verdict,  # `differs` comes before `unverified`
    )
    return Probed(
        asked=ranks[0].asked,
        finding=findings[0] if findings else None,
        recomputation=next(
            (
                f"{each.recomputation} on rank {rank}" if len(ranks) > 1 else each.recomputation
                for rank, each in enumerate(ranks)
                if each.recomputation
            ),
            "",
        ),
        cause=next((rank.cause for rank in ranks if rank.cause), ""),
        late_reads=joined(rank.late_reads for rank in ranks),
        notes=joined(rank.notes for rank in ranks),
    )
