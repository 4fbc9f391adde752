"""The sweeper: Hydra's own product of all values, but nothing is on disk before all points compose.

Hydra imports it in every Hydra application of the environment, so it imports nothing of the harness.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, OverrideType
from hydra.core.utils import JobReturn

ASKED_FOR = ("budget", "compiler_budget")
"""Variants of AC that a glob leaves out: they need what a command must ask for, bytes or a compiler."""


class ProductSweeper(BasicSweeper):
    """Every combination of the swept values, handed to the launcher at once.

    A point whose choice of a group does not have an option (`ac=none,full ac.early_stop=false`) composes all
    the same: the option is added, and the harness refuses that point alone.
    """

    def sweep(self, arguments: list[str]) -> list[Sequence[JobReturn]]:
        """Launch all points at once; one that does not compose ends the command."""
        assert self.hydra_context is not None
        assert self.launcher is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        overrides = parser.parse_overrides([*self._parse_config(), *arguments])
        for override in overrides:
            _add_where_missing(override)
            _leave_out(override)
        (points,) = self.split_arguments(overrides, max_batch_size=None)
        return [self.launcher.launch(points, initial_job_idx=0)]


def _add_where_missing(override: Override) -> None:
    if "." in override.key_or_group and override.type is OverrideType.CHANGE:
        override.type = OverrideType.FORCE_ADD


def _leave_out(override: Override) -> None:
    value = override.value()
    if override.key_or_group == "ac" and isinstance(value, Glob):
        value.exclude.extend(ASKED_FOR)


# a plain node, as for the launcher
ConfigStore.instance().store(
    group="hydra/sweeper",
    name="product",
    node={
        "_target_": "hydra_plugins.acbench.sweeper.ProductSweeper",
        "max_batch_size": None,
        "params": None,
    },
    provider="acbench",
)
