"""The instrumented step of a twin, which all variants of a sweep are held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from harness.experiment.experiment import Experiment
from harness.measure.step import StepReport
from harness.records.measured import MeasuredMemory, MeasuredWork, Routing
from strategies.budget.planning.recorded_bound import RecordedStep


@dataclass(frozen=True, kw_only=True, slots=True)
class TwinStep:
    """One rank's step of a twin; plain values, so that another trial can read it.

    Fields:
        routing: what its routers did, in this step and those before.
        step: its operators and storages, from which bounds follow.
    """

    memory: MeasuredMemory
    work: MeasuredWork
    routing: tuple[Routing, ...] = ()
    step: RecordedStep

    @classmethod
    def of(cls, report: StepReport, memory: MeasuredMemory, routing: Sequence[Routing] = ()) -> Self:
        """Return what a report shows.

        Args:
            memory: that of the report, with the allocator's numbers.
        """
        blocks = sum(report.work.calls.values())
        return cls(
            memory=memory,
            work=report.work,
            routing=tuple(routing),
            step=RecordedStep.of(report.operators, report.ledger, blocks),
        )


def is_repeatable(experiment: Experiment, device: torch.device) -> bool:
    """Say whether each trial on `device` measures the same step of the twin of `experiment`.

    An allocator's numbers depend on what has run before, compiled code on how it was called before, a user's
    model on whatever its code reads, and a twin on what a user's variant has left switched on before it.
    """
    is_users = experiment.model.runs_user_code() or experiment.ac.runs_user_code()
    return device.type == "cpu" and not experiment.is_compiled and not is_users
