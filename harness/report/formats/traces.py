"""Formats of other programs that show the step of a trial."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from harness.records.step_trace import StepTrace
from harness.report.formats.memory_viz import to_memory_viz
from harness.report.formats.perfetto import to_perfetto


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """A format of a step.

    Fields:
        file: name of the file in the folder of the trial.
        content: makes it of the steps of all ranks and of the name of the trial.
    """

    file: str
    content: Callable[[Sequence[StepTrace], str], str | bytes]


TRACES: Mapping[str, TraceFormat] = {
    "perfetto": TraceFormat("perfetto.json", to_perfetto),
    "memory_viz": TraceFormat("memory_viz.pickle", lambda steps, _: to_memory_viz(steps)),
}
