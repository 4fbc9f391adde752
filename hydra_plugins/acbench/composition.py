"""Composing the points of a sweep: by Hydra, once for all points that differ in plain values alone.

Hydra takes some 70 ms of CPU for a point, 70 s for 1,000. The points of a large sweep mostly repeat a few
choices with other values of the top level (`seed=0`, `seed=1`). Such a value decides nothing else, so the
choices are composed once, and each point is a copy with its own values. Every other point is composed by
Hydra alone, errors included.

Hydra imports this module in every Hydra application of the environment, so it imports nothing of the harness.
"""

from __future__ import annotations

import pickle
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

_PAUSE_S = 1.0
"""Time between two lines of progress; a sweep that is composed sooner writes none."""

_PLAIN = (bool, int, float, str)


def compose_all(
    loader: ConfigLoader, master: DictConfig, points: Sequence[Sequence[str]]
) -> list[DictConfig]:
    """Return the configuration of every point, as tasks of Hydra receive it: without the node `hydra`.

    Args:
        loader: Hydra's.
        master: the configuration of the sweep, with its node `hydra`.
        points: the overrides of each point.

    Raises:
        HydraException, ValueError: what `load_sweep_config` raises about the first wrong point.
    """
    composer, configs = _Composer(loader=loader, master=master), []
    due_s = time.monotonic() + _PAUSE_S
    for overrides in points:
        configs.append(composer.compose(overrides))
        if time.monotonic() >= due_s:
            due_s = time.monotonic() + _PAUSE_S
            sys.stderr.write(f"acbench: composed {len(configs):,} of {len(points):,} points\n")
    return configs


@dataclass(frozen=True, kw_only=True, slots=True)
class _Composer:
    """Composes the points of one command.

    Fields:
        loader: Hydra's.
        master: the configuration of the sweep.
        parser: of overrides.
        parsed: the overrides by line, as far as points have had them.
        composed: pickled configurations by their overrides.
        groups: names of the top level, and whether each is a configuration group.
    """

    loader: ConfigLoader
    master: DictConfig
    parser: OverridesParser = field(default_factory=OverridesParser.create)
    parsed: dict[str, Override] = field(default_factory=dict)
    composed: dict[tuple[str, ...], bytes] = field(default_factory=dict)
    groups: dict[str, bool] = field(default_factory=dict)

    def compose(self, lines: Sequence[str]) -> DictConfig:
        """Return the configuration of a point."""
        try:
            values = self._values(lines)
            config = self._copy(tuple(line for line in lines if line not in values))
            if all(isinstance(config.get(override.key_or_group), _PLAIN) for override in values.values()):
                for override in values.values():
                    OmegaConf.update(config, override.key_or_group, override.value())
                return config
        except (HydraException, OmegaConfBaseException, ValueError):
            pass  # Hydra says what is wrong, in its own words
        return self._in_full(lines)

    def _values(self, lines: Sequence[str]) -> dict[str, Override]:
        """Return, by line, the overrides of a point that set one value of the top level and nothing else."""
        overrides = {line: self._parse(line) for line in lines}
        names = [re.split("[./@]", override.key_or_group)[0] for override in overrides.values()]
        return {
            line: override
            for line, override in overrides.items()
            if _is_value(override)
            and names.count(override.key_or_group) == 1
            and not self._is_group(override)
        }

    def _parse(self, line: str) -> Override:
        if line not in self.parsed:
            (self.parsed[line],) = self.parser.parse_overrides([line])
        return self.parsed[line]

    def _is_group(self, override: Override) -> bool:
        name = override.key_or_group
        if name not in self.groups:
            command: Iterable[str] = self.master.hydra.overrides.hydra
            self.groups[name] = bool(
                self.loader.get_group_options(
                    name, config_name=self.master.hydra.job.config_name, overrides=list(command)
                )
            )
        return self.groups[name]

    def _copy(self, lines: tuple[str, ...]) -> DictConfig:
        if lines not in self.composed:
            self.composed[lines] = pickle.dumps(self._in_full(lines))
        config: DictConfig = pickle.loads(self.composed[lines])  # noqa: S301 (our own; a deepcopy takes 7 times as long)
        return config

    def _in_full(self, lines: Sequence[str]) -> DictConfig:
        config = self.loader.load_sweep_config(self.master, list(lines))
        with open_dict(config):
            del config["hydra"]
        return config


def _is_value(override: Override) -> bool:
    """Return whether an override sets a name of the top level to a plain value."""
    return (
        override.type is OverrideType.CHANGE
        and override.package is None
        and override.key_or_group.isidentifier()
        and not override.is_sweep_override()
        and isinstance(override.value(), _PLAIN)
        and "${" not in str(override.input_line)
    )
