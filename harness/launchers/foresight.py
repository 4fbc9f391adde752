"""The prediction of a trial before it runs; the trial runs all the same where that fails."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.experiment.devices import device_type
from harness.experiment.experiment import Experiment
from harness.experiment.protocol import Protocol
from harness.launchers.task import Task
from harness.predict.hardware import Hardware
from harness.ranks.forkserver import ForkServerError
from harness.records.predicted_step import PredictedStep

PATIENCE_S = 30.0
"""Seconds after which a trial runs without a prediction."""

_AHEAD_S = 2.0
"""Seconds within which further trials are predicted with one.

The process that predicts ends when a trial begins, and the first step that it traces takes longest: 0.9 s of
CPU time for 0.6 s (gpt_nano, ac=full), 0.4 s for 0.2 s (mlp).
"""

_PREDICTION = "harness.predict.prediction:predicted_step"


@dataclass(kw_only=True, slots=True)
class Foresight:
    """The predictions of trials that run one after the other, each made before its trial runs.

    With it are made as many further ones as there have been before: the first trial waits for no other's.

    Fields:
        call, folder: as of `foreseen`.
        tasks: the trials, in order; none: each is predicted alone.
    """

    call: Callable[..., Any]
    folder: Path
    tasks: Sequence[Task] = ()
    _made: int = 0
    _waiting: dict[str, PredictedStep | None] = field(default_factory=dict)

    def of(self, task: Task) -> PredictedStep | None:
        """Return what `foreseen` returns of a trial."""
        end_s = time.monotonic() + _AHEAD_S
        if task.trial_id not in self._waiting:
            for each in (task, *self._after(task)):
                if each is task or time.monotonic() < end_s:
                    found = foreseen(each.experiment, each.hardware, self.call, folder=self.folder)
                    self._waiting[each.trial_id] = found
                    self._made += 1
        return self._waiting.pop(task.trial_id)

    def _after(self, task: Task) -> list[Task]:
        """Return the trials to predict in the process of `task`; users' code shares it with none."""
        later = self.tasks[self.tasks.index(task) + 1 :] if task in self.tasks else ()
        is_shared = not task.experiment.ac.runs_user_code()
        return [each for each in later if is_shared and not each.experiment.ac.runs_user_code()][: self._made]


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
