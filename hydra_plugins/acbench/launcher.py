"""The sweep launcher: every point of `acbench -m` is composed before the first one runs.

Hydra imports this module in every Hydra application of the environment, so it imports nothing of the harness:
the task function it is given takes all points at once, with the settings of the launcher that was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from hydra_plugins.acbench.composition import compose_all


class SweepLauncher(Launcher):
    """Hands a whole sweep over at once, whichever `hydra/launcher` was chosen."""

    def __init__(self, **_settings: Any) -> None:
        """Take the settings of the choice; `launch` reads them from the configuration."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what `launch` needs to compose points."""
        self._context = hydra_context
        self._task: Callable[[Mapping[str, Any]], Sequence[Any]] = task_function
        self._config = config

    def launch(
        self,
        job_overrides: Sequence[Sequence[str]],
        initial_job_idx: int,  # noqa: ARG002 (trials are named by content, not by number)
    ) -> Sequence[JobReturn]:
        """Compose all points, run them, and return one completed job a point; a failed trial is a record.

        A point without a record yet, because it was submitted only, returns `None`.
        """
        configs = compose_all(self._context.config_loader, self._config, job_overrides)
        settings = OmegaConf.to_container(self._config.hydra.launcher, resolve=True)
        found = self._task({"points": configs, "launcher": settings})
        return [
            JobReturn(
                overrides=list(overrides),
                cfg=config,
                task_name=trial_id,
                working_dir=str(Path(config.outputs_dir) / config.name / trial_id),
                status=JobStatus.COMPLETED,
                _return_value=record,
            )
            for overrides, config, (trial_id, record) in zip(job_overrides, configs, found, strict=True)
        ]
