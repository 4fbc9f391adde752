"""Experiments run exactly as `acbench` runs them, except that those of one mesh share a set of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

import harness
from harness.command_line.schema import experiment_fields, materialise
from harness.experiment.devices import device_type
from harness.experiment.experiment import Experiment
from harness.launchers.resource_shape import Resources
from harness.measure.environment import describe, environment_id
from harness.ranks.agent import Agent
from harness.ranks.culprit import Outcome
from harness.ranks.entry import RankContext
from harness.ranks.start import RankJob
from harness.records.record import Ending, Identity, Record, build
from harness.records.store import trial_id
from harness.trial.parallel import device_mesh
from harness.trial.run import run
from harness.trial.trial_plan import TrialPlan
from strategies import eager_variants

PRELOAD = ("bench.trials",)
"""What the agent's fork server imports, so that no rank does."""

CONF = Path(harness.__file__).parents[1] / "conf"
"""The configuration that ships with us."""

UNBUDGETED = tuple(name for name in eager_variants if name != "budget")
"""Variants that run eagerly and need no more than their name; `bench.budget` is about the other one."""

_DEADLINE_S = 120.0


def experiments(points: Iterable[Sequence[str]]) -> list[Experiment]:
    """Return the experiment of each list of overrides, as the command line would compose it."""
    return [materialise(experiment_fields(config)) for config in configs(points)]


def configs(points: Iterable[Sequence[str]]) -> list[DictConfig]:
    """Return what Hydra composes of each list of overrides."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return [compose("config", list(overrides)) for overrides in points]


def run_all(plans: Sequence[TrialPlan], context: RankContext) -> dict[str, Any]:
    """Run the trials of `plans` one after the other in this rank; the entry of its process."""
    # trials of one mesh: groups of their own would leave each rank with nine more threads a trial
    devices = device_mesh(plans[0].experiment.mesh, context.device)
    return {"results": [run(plan, context, devices) for plan in plans]}


def records(agent: Agent, chosen: Sequence[Experiment], trial_dir: Path) -> list[Record]:
    """Run experiments of one mesh in one set of ranks and return their records, in order.

    Where a trial fails, all are run again, each in ranks of its own: one failure hides no other result.

    Args:
        agent: preloaded with `PRELOAD`.
        chosen: experiments of one mesh.
        trial_dir: folder of the ranks' logs.
    """
    started_at = _now()
    outcome = agent.run(_job(chosen, trial_dir))
    if outcome.status != "ok" and len(chosen) > 1:
        return [record for each in chosen for record in records(agent, [each], trial_dir)]
    return [_record(each, index, outcome, started_at) for index, each in enumerate(chosen)]


def _job(chosen: Sequence[Experiment], trial_dir: Path) -> RankJob:
    mesh = chosen[0].mesh
    return RankJob(
        trial_dir=trial_dir,
        entry="bench.trials:run_all",
        payload=[TrialPlan(experiment=experiment) for experiment in chosen],
        ranks=mesh.world_size,
        deadline_s=_DEADLINE_S * len(chosen),
        device=device_type(mesh),
        threads_per_rank=Resources(core_count=len(os.sched_getaffinity(0))).threads_of_rank(mesh.world_size),
    )


def _record(experiment: Experiment, index: int, outcome: Outcome, started_at: str) -> Record:
    resolved, environment = experiment.to_dict(), describe(device_type(experiment.mesh))
    identity = Identity(
        trial_id=trial_id(resolved),
        environment_id=environment_id(environment),
        name="bench",
        experiment=resolved,
    )
    ending = Ending(
        status=outcome.status,
        error=None if outcome.error is None else asdict(outcome.error),
        started_at=started_at,
        finished_at=_now(),
    )
    results = [result["results"][index] for result in outcome.results]
    return build(identity, ending, results, environment=environment)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
