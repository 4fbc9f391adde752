"""The prediction of a trial right before it runs; the trial runs all the same where that fails."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.experiment.devices import device_type
from harness.experiment.experiment import Experiment
from harness.experiment.protocol import Protocol
from harness.predict.hardware import Hardware
from harness.ranks.forkserver import ForkServerError
from harness.records.predicted_step import PredictedStep

PATIENCE_S = 30.0
"""Seconds after which a trial runs without a prediction."""

_PREDICTION = "harness.predict.prediction:predicted_step"


def foreseen(
    experiment: Experiment, hardware: Hardware | None, call: Callable[..., Any], *, folder: Path
) -> PredictedStep | None:
    """Return what the instrumented step of a trial will show; `None` where nobody can or need know.

    Args:
        hardware: what its time is predicted for; `None` predicts none.
        call: calls a function where torch is imported, as `Agent.call` does.
        folder: keeps plans that the trial needs, too.
    """
    # a trial with fewer timed pairs takes hardly longer than its prediction; a user's model is called by its
    # ranks alone, and kernels of CUDA are not known
    is_long = experiment.protocol.timed_pairs >= Protocol().timed_pairs
    is_ours = not experiment.model.runs_user_code() and device_type(experiment.mesh) == "cpu"
    if not (is_long and is_ours):
        return None
    try:
        found: PredictedStep | None = call(_PREDICTION, experiment, hardware, folder, deadline_s=PATIENCE_S)
    except ForkServerError as error:
        sys.stderr.write(f"acbench: runs without a prediction: {error}\n")
        return None
    return found
