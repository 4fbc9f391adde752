"""The findings of a check, and the failure that says them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.measure.probes.recomputed_values import Divergence, Margin
from harness.records.parity_result import Parity

_GALLERY = "docs/gallery/README.md"

_SHOWN = 4
"""Names that a line lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Neutrality:
    """The findings of a check.

    Fields:
        verdict: `neutral`, `differs`, `inert` or `unverified`.
        reason: why it is not `neutral`.
        first: the first difference: `step`, `part`, `name`, `rank`, `index`, `expected`, `actual`, `probe`;
            `None` where nothing differs.
        parity: the plain model and the variant, side by side; `None` where one of them raised.
        saved_bytes, plain_saved_bytes: bytes that forward leaves for backward, with and without the variant.
        recomputed_ops: number of operators that the variant computes a second time, by name.
        recomputed_modules: FQNs of the outermost modules that the variant calls again.
        lost, gained: parameters that get a gradient without the variant only, and with it only.
        recomputation: the first recomputed value that forward did not make; `None` where there is none.
        recomputation_rank: the rank that made it, where there are several.
        changed: state that was changed after forward had read it and before backward began; empty where
            nothing differs.
        read_late: those of `changed` that the recomputation reads: another change of them changes gradients.
        late_reads: state that the recomputation of a neutral variant reads besides its inputs. Nothing
            changed it between forward and recomputation; whatever does makes gradients wrong.
        margins: how close each choice of the largest numbers, such as a router's, is to another one.
        cause: what this looks like; empty where nothing known does.
        remedy: a change with which the check was run again and the variant is neutral; empty without one.
        in_vain: changes with which the check was run again and the variant is not neutral. Where one takes
            the first difference away, what differs then stands beside it.
        perhaps: what may help, and was not tried.
        left_behind: global state that a model of the check has changed, such as a flag of torch or a function
            of a class; it was put back.
        notes: sentences on what was not looked at, and why.
    """

    verdict: str
    reason: str | None = None
    first: Mapping[str, Any] | None = None
    parity: Parity | None = None
    saved_bytes: int | None = None
    plain_saved_bytes: int | None = None
    recomputed_ops: Mapping[str, int] = field(default_factory=dict)
    recomputed_flops: int = 0
    recomputed_modules: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    gained: tuple[str, ...] = ()
    recomputation: Divergence | None = None
    recomputation_rank: int | None = None
    changed: tuple[str, ...] = ()
    read_late: tuple[str, ...] = ()
    late_reads: tuple[str, ...] = ()
    margins: tuple[Margin, ...] = ()
    cause: str = ""
    remedy: str = ""
    in_vain: tuple[str, ...] = ()
    perhaps: str = ""
    left_behind: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return verdict, bytes and causes, a line each."""
        lines = [self.verdict if self.reason is None else f"{self.verdict}: {self.reason}"]
        if self.plain_saved_bytes is not None:
            lines.append(f"saved: {self.saved_bytes} bytes, {self.plain_saved_bytes} without the variant")
        lines += [
            f"{what}: {value}"
            for what, value in (
                ("gradient without the variant only", _listed(self.lost)),
                ("gradient with the variant only", _listed(self.gained)),
                (f"recomputation{_on_rank(self.recomputation_rank)}", self.recomputation or ""),
                ("changed since forward read it", _listed(self.changed)),
                ("of this the recomputation reads", _listed(self.read_late)),
                ("the recomputation reads, and nothing has changed", _listed(self.late_reads)),
                ("likely cause", self.cause),
                ("gallery", _links(self.cause)),
                ("remedy", self.remedy),
                ("none of these helps", "" if self.remedy else "; ".join(self.in_vain)),
                ("perhaps", self.perhaps),
                ("left behind, and put back", _listed(self.left_behind)),
            )
            if value
        ]
        lines += [f"note: {note}" for note in self.notes]
        return "\n  ".join(lines)


def _on_rank(rank: int | None) -> str:
    return "" if rank is None else f" on rank {rank}"


def _links(cause: str) -> str:
    """Return where the entries are that a cause names as `looks like gallery 3 or 9: …`."""
    begin = cause.partition(":")[0] if cause.startswith("looks like gallery ") else ""
    anchors = [f"#n{word}" for word in begin.split() if word.isdecimal()]
    return f"{_GALLERY}{' '.join(anchors)}" if anchors else ""


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


class NotNeutral(AssertionError):  # noqa: N818 (it is the finding of a test, no error of a program)
    """The variant is not neutral, or nothing proves that it is.

    Fields:
        verdict: `differs`, `inert` or `unverified`.
        first: the first difference, as in `Neutrality`; empty where nothing differs.
        found: everything that the check found.
    """

    def __init__(self, found: Neutrality) -> None:
        super().__init__(str(found))
        self.found = found
        self.verdict = found.verdict
        self.first: dict[str, Any] = dict(found.first or {})
