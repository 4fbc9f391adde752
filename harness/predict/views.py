"""Views of strategies on a trial that nobody runs: plans of its step are made on a fake rank first."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from harness.errors import ConfigError
from harness.experiment.experiment import Experiment
from harness.predict.fake_rank import planned_on_fake_rank
from harness.predict.prediction import step_of
from harness.trial import without_memory
from harness.trial.plan_budget import PLAN_FILE, carrying_out
from strategies.budget.plan import Plan


def view_of(experiment: Experiment, what: str) -> str:
    """Return what a strategy of `experiment` has to show.

    Args:
        experiment: experiment of one trial; nothing of it runs.

    Raises:
        ConfigError: none of them has such a view; the step cannot be followed on fake tensors.
        StrategyError: the strategy does not suit the model, or there is no plan.
    """
    planner, chunk = experiment.ac.step_planner, experiment.chunk
    views = experiment.ac.views + (() if chunk.chunk_offers is None else chunk.views)
    if planner is None or what not in views:
        return without_memory.show(experiment, what)
    if experiment.mesh.pp > 1:
        return _plans_of_ranks(experiment, what)
    if planner.plan_file is not None:
        return without_memory.show(carrying_out(experiment, Path(planner.plan_file)), what)
    with TemporaryDirectory() as folder:
        planned = planned_on_fake_rank(experiment, without_memory.PLANNED_FOR, Path(folder) / PLAN_FILE)
        view = without_memory.show(planned, what)
    return f"{without_memory.ELSEWHERE}\n{view}" if without_memory.is_elsewhere(experiment) else view


def _plans_of_ranks(experiment: Experiment, what: str) -> str:
    """Return the plan of each rank of a pipeline.

    Raises:
        ConfigError: another view is asked for.
        StrategyError: there is no plan.
    """
    if what != "plan":
        problem = f"{what} is a view of a whole model, and {experiment.mesh.label} has stages"
        raise ConfigError("show", f"{problem}; use show=plan, or mesh.pp=1 without its options")
    shown = []
    for rank in range(experiment.mesh.pp):
        plan = step_of(experiment, without_memory.PLANNED_FOR, pp_rank=rank).observation.plan
        assert plan is not None, "its variant plans"
        stages = " and ".join(map(str, plan["stages"]))
        shown.append(
            f"rank {experiment.mesh.first_rank(rank)}, stage {stages}\n{Plan.from_dict(plan).describe()}"
        )
    return "\n\n".join(shown)
