"""The instructions for the ranks of a trial, as the driver writes them down: without torch."""

from __future__ import annotations

from dataclasses import dataclass

from harness.experiment.experiment import Experiment

ENTRY = "harness.trial.run:run"
"""Called in every rank with a `TrialPlan`."""

BASELINES = ("paired", "sequential", "none")
"""Ways to compare with the twin, in the order in which they are tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialPlan:
    """The instructions for one rank.

    Fields:
        baseline: how the twin is compared: `paired` (side by side, timed A B B A), `sequential` (one
            after the other, where two models do not fit) or `none` (where the twin does not fit at all).
    """

    experiment: Experiment
    baseline: str = "paired"
