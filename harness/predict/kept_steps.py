"""Predicted steps in full, kept next to their records as those of trials are."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from harness.experiment.experiment import Experiment
from harness.measure.step import StepReport
from harness.measure.step_trace import traced
from harness.predict.fake_rank import step_log
from harness.predict.prediction import most_of_ranks, predicted_ranks
from harness.records.measured import LivingTensor
from harness.records.step_trace import write_step


def keep_steps(experiment: Experiment, folder: Path) -> tuple[LivingTensor, ...]:
    """Keep the step of each rank that is predicted; return the largest tensors at the highest peak.

    They are traced in full: a step that is composed of shorter ones does not tell what lives when.

    Raises:
        ConfigError, StrategyError, RuntimeError: as of `fake_rank.step_log`.
        OSError: a step cannot be written.
    """

    def keep(report: StepReport, rank: int) -> None:
        write_step(traced(report, rank), folder)

    most = most_of_ranks(experiment)
    logs = [
        step_log(experiment, rank, partial(keep, rank=rank), most) for rank in predicted_ranks(experiment)
    ]
    memories = [each.history.memory() for each in logs]
    return max(memories, key=lambda memory: memory.peak_bytes).largest_at_peak
