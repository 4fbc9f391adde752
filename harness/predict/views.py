"""Views of strategies on a trial that nobody runs: plans of its step are made on a fake rank first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from harness.errors import ConfigError
from harness.experiment.experiment import Experiment
from harness.predict.fake_rank import planned_on_fake_rank
from harness.predict.prediction import predicted_ranks, step_of
from harness.trial import without_memory
from harness.trial.plan_budget import PLAN_FILE, carrying_out
from harness.trial.plan_files import file_of, plan_of_rank
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
    if len(predicted_ranks(experiment)) > 1:
        return _plans_of_ranks(experiment, what)
    if planner.plan_file is not None:
        mesh, file = experiment.mesh, Path(planner.plan_file)
        given = replace(experiment, ac=plan_of_rank(experiment.ac, mesh, 0))
        return without_memory.show(carrying_out(given, file_of(file, mesh, 0)), what)
    with TemporaryDirectory() as folder:
        planned = planned_on_fake_rank(experiment, Path(folder) / PLAN_FILE)
        view = without_memory.show(planned, what)
    return f"{without_memory.ELSEWHERE}\n{view}" if without_memory.is_elsewhere(experiment) else view


def _plans_of_ranks(experiment: Experiment, what: str) -> str:
    """Return the plan of each rank whose step is unlike that of others.

    Raises:
        ConfigError: another view is asked for.
        StrategyError: there is no plan.
    """
    mesh = experiment.mesh
    if what != "plan":
        problem = f"{what} is a view of one plan, and each of the ranks of {mesh.label} has its own"
        remedy = "mesh.pp=1 without its options" if mesh.pp > 1 else "mesh.cp_method=gather"
        raise ConfigError("show", f"{problem}; use show=plan, or {remedy}")
    shown, ranks = [], predicted_ranks(experiment)
    alike = mesh.world_size // len(ranks)
    for rank in ranks:
        plan = step_of(experiment, rank=rank).observation.plan
        assert plan is not None, "its variant plans"
        stages = f", stage {' and '.join(map(str, plan['stages']))}" if plan["stages"] else ""
        of_ring = mesh.cp_method == "ring" and mesh.cp > 1
        part = f", part {mesh.coordinate(rank).cp} of {mesh.cp} in the ring" if of_ring else ""
        count = f", which {alike} ranks share" if alike > 1 else ""
        shown.append(f"rank {rank}{stages}{part}{count}\n{Plan.from_dict(plan).describe()}")
    return "\n\n".join(shown)
