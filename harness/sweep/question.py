"""A question about a point before it runs, and its answer; both go between processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.experiment.experiment import Experiment
from harness.predict.hardware import Hardware
from harness.predict.solve import Solved
from harness.records.record import Record

FOLLOWED = "cpu"
"""Device whose kernels predictions follow, whatever the hardware."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A question about one point.

    Fields:
        hardware: where it would run; `None` asks for bytes and FLOPs alone.
        field: field to solve for; `None` predicts the point as it is.
        kept_in: folder of the sweep in which the steps are kept; `None` keeps none.
    """

    experiment: Experiment
    label: str
    hardware: Hardware | None = None
    field: str | None = None
    kept_in: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The prediction for one point.

    Fields:
        record: its record; that of the solved point where a field was asked for. `None` where it is refused.
        bound_by: what its step waits for longest on the hardware: `compute`, `memory`, `network` or `host`.
    """

    record: Record | None = None
    solved: Solved | None = None
    refusal: ValueError | None = None
    bound_by: str | None = None
