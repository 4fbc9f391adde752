"""Composing the points of a sweep: by Hydra, once for all points that differ in plain values alone.

Hydra takes some 70 ms of CPU for a point, 70 s for 1,000. The points of a large sweep mostly repeat a few
choices with other values of the top level (`seed=0`, `seed=1`). Such a value decides nothing else, so the
choices are composed once, and each point is a copy with its own values. Every other point is composed by
Hydra alone, errors included.

Hydra executes this module in every Hydra application of the environment, and not as an import: it imports
nothing of the harness, and defines no dataclass.
"""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Iterable, Sequence

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

_REPORTED = 50
"""Compositions by Hydra, some 4 s, between two lines of progress."""

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
    composer, configs, reported = _Composer(loader, master), [], _REPORTED
    for overrides in points:
        configs.append(composer.compose(overrides))
        if composer.compositions >= reported:
            reported += _REPORTED
            sys.stderr.write(f"acbench: composed {len(configs):,} of {len(points):,} points\n")
    return configs


class _Composer:
    """Composes the points of one command.

    Attributes:
        compositions: how many Hydra has made so far.
    """

    def __init__(self, loader: ConfigLoader, master: DictConfig) -> None:
        self.compositions = 0
        self._loader = loader
        self._master = master
        self._parser = OverridesParser.create()
        self._parsed: dict[str, Override] = {}  # by line
        self._composed: dict[tuple[str, ...], bytes] = {}  # pickled configurations by their lines
        self._groups: dict[str, bool] = {}  # whether a name of the top level is a group

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
        if line not in self._parsed:
            (self._parsed[line],) = self._parser.parse_overrides([line])
        return self._parsed[line]

    def _is_group(self, override: Override) -> bool:
        name = override.key_or_group
        if name not in self._groups:
            command: Iterable[str] = self._master.hydra.overrides.hydra
            self._groups[name] = bool(
                self._loader.get_group_options(
                    name, config_name=self._master.hydra.job.config_name, overrides=list(command)
                )
            )
        return self._groups[name]

    def _copy(self, lines: tuple[str, ...]) -> DictConfig:
        if lines not in self._composed:
            self._composed[lines] = pickle.dumps(self._in_full(lines))
        config: DictConfig = pickle.loads(self._composed[lines])  # noqa: S301 (our own; a deepcopy takes 7 times as long)
        return config

    def _in_full(self, lines: Sequence[str]) -> DictConfig:
        self.compositions += 1
        config = self._loader.load_sweep_config(self._master, list(lines))
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
