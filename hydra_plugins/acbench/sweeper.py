"""The sweeper: Hydra's own product of all values, but nothing is on disk before all points compose.

Hydra imports it in every Hydra application of the environment, so it imports nothing of the harness.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fnmatch import fnmatch

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, OverrideType
from hydra.core.utils import JobReturn
from hydra.errors import HydraException

ASKED_FOR = (
    "accelerate",
    "budget",
    "compiler_budget",
    "deepspeed",
    "fairscale",
    "file",
    "megatron",
    "modules",
    "python",
    "torch_remat",
    "torchtitan",
    "transformers",
    "trl",
)
"""Variants of AC that `glob(*)` leaves out: they need bytes, a compiler, names, code of the
user's or a package."""


class ProductSweeper(BasicSweeper):
    """Every combination of the swept values, handed to the launcher at once.

    A point whose choice of a group does not have an option (`ac=none,full ac.early_stop=false`) composes all
    the same: the option is added, and the harness refuses that point alone.
    """

    def __init__(
        self, max_batch_size: int | None, params: dict[str, str] | None, means_too: Sequence[str]
    ) -> None:
        super().__init__(max_batch_size, params)
        self._asked_for = [name for name in ASKED_FOR if name not in means_too]

    def sweep(self, arguments: list[str]) -> list[Sequence[JobReturn]]:
        """Launch all points at once; one that does not compose ends the command."""
        assert self.hydra_context is not None
        assert self.launcher is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        overrides = parser.parse_overrides([*self._parse_config(), *arguments])
        for override in overrides:
            if "." in override.key_or_group and override.type is OverrideType.CHANGE:
                override.type = OverrideType.FORCE_ADD
            _choose(override, self._asked_for)
        (points,) = self.split_arguments(overrides, max_batch_size=None)
        return [self.launcher.launch(points, initial_job_idx=0)]


def _choose(override: Override, asked_for: Sequence[str]) -> None:
    """Let a glob leave out what must be asked for.

    Args:
        override: one word of the command.
        asked_for: variants of AC that must be asked for.

    Raises:
        HydraException: nothing is left.
    """
    value = override.value()
    if not isinstance(value, Glob):
        return
    assert override.config_loader is not None
    options = override.config_loader.get_group_options(override.key_or_group)
    if override.key_or_group == "ac":
        absent = [name for name in left_out(value.include, options, asked_for) if name in options]
        value.exclude.extend(absent)
        matched = [name for name in absent if any(fnmatch(name, pattern) for pattern in value.include)]
        if matched:
            words = "which need options, a compiler, code of yours or a package: ask for them by name"
            sys.stderr.write(f"ac: the glob leaves out {', '.join(matched)}, {words}\n")
    if not value.filter(options):
        pattern = (override.input_line or "").partition("=")[2]
        known = f"none of {', '.join(options)}" if options else "nothing, because it is no group"
        raise HydraException(f"{override.key_or_group}: {pattern} matches {known}; give values by name")


def left_out(
    patterns: Sequence[str], options: Sequence[str], asked_for: Sequence[str] = ASKED_FOR
) -> list[str]:
    """Return the variants that a glob over `ac` does not mean.

    A pattern asks for what must be asked for, if it matches nothing else: `compiler*` does, `*` does not.

    Args:
        asked_for: variants that must be asked for.
    """
    usual = [name for name in options if name not in asked_for]
    asking = [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in usual)]
    return [name for name in asked_for if not any(fnmatch(name, pattern) for pattern in asking)]


# a plain node, as for the launcher
ConfigStore.instance().store(
    group="hydra/sweeper",
    name="product",
    node={
        "_target_": "hydra_plugins.acbench.sweeper.ProductSweeper",
        "max_batch_size": None,
        "params": None,
        "means_too": [],  # of ASKED_FOR
    },
    provider="acbench",
)
