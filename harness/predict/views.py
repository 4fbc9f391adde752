"""Views of strategies on a trial that nobody runs: plans of its step are made on a fake rank first."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from harness.experiment.experiment import Experiment
from harness.predict.fake_rank import planned_on_fake_rank
from harness.trial import without_memory
from harness.trial.plan_budget import PLAN_FILE, carrying_out


def view_of(experiment: Experiment, what: str) -> str:
    """Return what a strategy of `experiment` has to show.

    Args:
        experiment: experiment of one trial; nothing of it runs.
        what: a view of one of its strategies.

    Raises:
        ConfigError: none of them has such a view; the step cannot be followed on fake tensors.
        StrategyError: the strategy does not suit the model, or there is no plan.
    """
    planner, chunk = experiment.ac.step_planner, experiment.chunk
    views = experiment.ac.views + (() if chunk.chunk_offers is None else chunk.views)
    if planner is None or what not in views:
        return without_memory.show(experiment, what)
    if planner.plan_file is not None:
        return without_memory.show(carrying_out(experiment, Path(planner.plan_file)), what)
    with TemporaryDirectory() as folder:
        planned = planned_on_fake_rank(experiment, without_memory.PLANNED_FOR, Path(folder) / PLAN_FILE)
        view = without_memory.show(planned, what)
    return f"{without_memory.ELSEWHERE}\n{view}" if without_memory.is_elsewhere(experiment) else view
