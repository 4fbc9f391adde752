"""What is asked of a model before its trial, in a process that has imported torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from harness.experiment.experiment import Experiment
from harness.predict import prediction, step_time
from harness.predict.hardware import Hardware
from harness.records.predicted_step import PredictedStep
from harness.sweep.planning_log import planning_shown
from harness.trial import preflight


def refusal(*arguments: Any) -> preflight.Refusal:
    """Return what `preflight.built_refusal` returns, and write meanwhile what strategies log to stderr."""
    with planning_shown():
        return preflight.built_refusal(*arguments)


def predicted_step(experiment: Experiment, hardware: Hardware | None) -> PredictedStep | None:
    """Return what `harness.predict` predicts of a trial; `None` where it predicts nothing.

    Args:
        experiment: the trial.
        hardware: what to predict the step time for; `None` predicts none.
    """
    seconds = None if hardware is None else step_time.timed_on(hardware)
    found = prediction.predicted_step(experiment, seconds)
    return found if found is None or hardware is None else replace(found, hardware=hardware.name)
