"""The prediction of a trial before it ran, and the outlook of a point that nobody has run.

Torch-free: reports stand it next to what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.records.measured import StepBytes, StepFlops


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedStep(StepFlops, StepBytes):
    """The instrumented step of rank 0 as predicted; bytes and FLOPs are those of `memory` and `work`.

    Fields:
        offloaded_bytes: bytes moved to host memory.
        collectives: number of collectives, by phase and name.
        collective_bytes: their payload, by phase and name.
        hardware: name of the hardware that a time was predicted for; `None` where none was named.
        assumes: what is assumed of the step, each in words that complete `assuming that`. Numbers are exact
            where nothing is, and estimates otherwise.
    """

    offloaded_bytes: int = 0
    collectives: dict[str, dict[str, int]] = field(default_factory=dict)
    collective_bytes: dict[str, dict[str, int]] = field(default_factory=dict)
    hardware: str | None = None
    step_time_s: float | None = None
    assumes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SolvedField:
    """The field that a point was solved for.

    Fields:
        field: its name on the command line.
        value: the largest or smallest value that fits; `None` where none does.
        is_limit: whether nothing beyond the value is possible, whatever the memory.
    """

    field: str
    value: int | None
    is_limit: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """The answer of a plan about a point, next to its prediction.

    Fields:
        state: `to run`, `done`, `elsewhere` or `refused`, in the sweep that the plan is of.
        hardware: name of the hardware; `None` where none was named.
        usable_bytes: bytes of it that a rank may take.
        needed_bytes: bytes of it that a rank takes; `None` where nothing is predicted.
        is_stand_in: whether kernels of another device were followed than the hardware's.
        bound_by: what the step waits for longest there: `compute`, `memory`, `network` or `host`.
    """

    state: str
    hardware: str | None = None
    usable_bytes: int | None = None
    needed_bytes: int | None = None
    is_stand_in: bool = False
    solved: SolvedField | None = None
    bound_by: str | None = None

    @property
    def fits(self) -> bool | None:
        """True if the step fits; `None` where no hardware was named or nothing is predicted."""
        if self.usable_bytes is None or self.needed_bytes is None:
            return None
        return self.needed_bytes <= self.usable_bytes


def assuming(assumes: Sequence[str]) -> str:
    """Return the sentence that a reader of estimates needs; `assumes` is not empty."""
    return f"predicted assuming that {', and that '.join(assumes)}"
