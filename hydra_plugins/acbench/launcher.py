"""The sweep launcher: every point of `acbench -m` is composed before the first one runs.

Hydra imports this module in every Hydra application of the environment, so it imports nothing of the harness:
the task function it is given takes all points at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class LocalLauncher(Launcher):
    """Runs a whole sweep under one agent, so that only its first point pays for imports."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what `launch` needs to compose points."""
        self._context = hydra_context
        self._task: Callable[[list[DictConfig]], Sequence[Any]] = task_function
        self._config = config

    def launch(
        self,
        job_overrides: Sequence[Sequence[str]],
        initial_job_idx: int,  # noqa: ARG002 (trials are named by content, not by number)
    ) -> Sequence[JobReturn]:
        """Compose all points, run them, and return one completed job a point; a failed trial is a record."""
        loader = self._context.config_loader
        configs = [loader.load_sweep_config(self._config, list(overrides)) for overrides in job_overrides]
        found = self._task(configs)
        return [
            JobReturn(
                overrides=list(overrides),
                cfg=config,
                task_name=record.trial_id,
                working_dir=str(Path(config.outputs_dir) / config.name / record.trial_id),
                status=JobStatus.COMPLETED,
                _return_value=record,
            )
            for overrides, config, record in zip(job_overrides, configs, found, strict=True)
        ]


# Hydra executes plugin modules before it registers them, which dataclasses cannot bear: a plain node it is
ConfigStore.instance().store(
    group="hydra/launcher",
    name="local",
    node={"_target_": "hydra_plugins.acbench.launcher.LocalLauncher"},
    provider="acbench",
)
