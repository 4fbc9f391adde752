"""What a trial will hold, predicted right before it runs; the trial runs all the same where that fails."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from harness.experiment.devices import device_type
from harness.experiment.experiment import Experiment, name_of
from harness.experiment.protocol import Protocol
from harness.models.python import PythonSpec
from harness.ranks.forkserver import ForkServerError

PATIENCE_S = 30.0
"""Seconds after which a trial runs without a prediction."""

_PREDICTION = "harness.predict.prediction:peak_bytes"


def foreseen_peak_bytes(experiment: Experiment, call: Callable[..., Any]) -> int | None:
    """Return what the instrumented step of a trial will hold at most; `None` where nobody can or need know.

    Args:
        experiment: the trial.
        call: calls a function where torch is imported, as `Agent.call` does.
    """
    if not is_foreseen(experiment):
        return None
    try:
        found: int | None = call(_PREDICTION, experiment, deadline_s=PATIENCE_S)
    except ForkServerError as error:
        sys.stderr.write(f"acbench: runs without a prediction: {error}\n")
        return None
    return found


def is_foreseen(experiment: Experiment) -> bool:
    """Whether a prediction tells more than it costs.

    A trial with fewer timed pairs than the standard's takes hardly longer than its prediction, and chunks
    would be planned once more. A user's model is called by its ranks alone; kernels of CUDA are not known.
    """
    is_long = experiment.protocol.timed_pairs >= Protocol().timed_pairs
    is_ours = not isinstance(experiment.model, PythonSpec) and device_type(experiment.mesh) == "cpu"
    return is_long and is_ours and name_of(experiment.chunk) == "none"
