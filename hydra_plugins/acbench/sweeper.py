"""The sweeper: Hydra's own product of all values, but nothing is on disk before all points compose.

Hydra imports it in every Hydra application of the environment, so it imports nothing of the harness.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn


class ProductSweeper(BasicSweeper):
    """Every combination of the swept values, handed to the launcher at once."""

    def sweep(self, arguments: list[str]) -> list[Sequence[JobReturn]]:
        """Launch all points at once; one that does not compose ends the command."""
        assert self.hydra_context is not None
        assert self.launcher is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        overrides = parser.parse_overrides([*self._parse_config(), *arguments])
        (points,) = self.split_arguments(overrides, max_batch_size=None)
        return [self.launcher.launch(points, initial_job_idx=0)]


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
