"""Composing the points of a sweep: by Hydra, once for all points that differ in plain values alone.

Hydra takes some 70 ms of CPU for a point, 70 s for 1,000. The points of a large sweep mostly repeat a few
choices with other values (`seed=0`, `seed=1`, `ac.fraction=0.5`). Such a value decides nothing else, so the
choices are composed once, and each point is a copy with its own values. Every other point is composed by
Hydra alone, errors included.

Hydra executes this module in every Hydra application of the environment, and not as an import: it imports
nothing of the harness, and defines no dataclass.
"""

from __future__ import annotations

import pickle
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf, open_dict

_REPORTED = 50
"""Compositions by Hydra, some 4 s, between two lines of progress."""

_MANY = 1000
"""Points above which progress is told by the clock, `_PAUSE_S` apart."""

_PAUSE_S = 2.0
_PLAIN = (bool, int, float, str)
_REPLACED = (*_PLAIN, type(None))
_KEY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def compose_all(
    loader: ConfigLoader, master: DictConfig, points: Sequence[Sequence[str]]
) -> list[DictConfig]:
    """Return the configuration of every point, as tasks of Hydra receive it: without the node `hydra`.

    Args:
        master: the configuration of the sweep, with its node `hydra`.

    Raises:
        HydraException, ValueError: what `load_sweep_config` raises about the first wrong point.
    """
    parser, command = OverridesParser.create(), master.hydra

    @cache
    def parsed(line: str) -> Override:
        (override,) = parser.parse_overrides([line])
        return override

    @cache
    def is_group(name: str) -> bool:
        own = list(command.overrides.hydra)
        return bool(loader.get_group_options(name, config_name=command.job.config_name, overrides=own))

    @cache
    def pickled(lines: Sequence[str]) -> bytes:
        config = loader.load_sweep_config(master, list(lines))
        with open_dict(config):
            del config["hydra"]
        return pickle.dumps(config)  # a deepcopy for each point takes 7 times as long

    def composed(lines: Sequence[str]) -> DictConfig:
        config: DictConfig = pickle.loads(pickled(tuple(lines)))  # noqa: S301 (our own)
        return config

    def point(lines: Sequence[str]) -> DictConfig:
        """Return the configuration of a point.

        Its plain values are set on one that is composed without them.
        """
        overrides = [parsed(line) for line in lines]
        keys = [override.key_or_group for override in overrides]
        values = {
            line: override
            for line, override in zip(lines, overrides, strict=True)
            if _is_value(override)
            and not is_group(override.key_or_group)
            and not any(
                _overlap(override.key_or_group, key) and not ("." not in key and is_group(key))
                for key in _others(keys, override.key_or_group)
            )
        }
        config = composed([line for line in lines if line not in values])
        for override in values.values():
            *path, name = override.key_or_group.split(".")
            holder = _holder(config, path)
            if holder is None or not _is_replaced(holder, name):
                return composed(lines)
            holder[name] = override.value()
        return config

    is_due = _clock(len(points), lambda: pickled.cache_info().misses)
    configs = []
    for lines in points:
        configs.append(point(lines))
        if is_due():
            sys.stderr.write(f"acbench: composed {len(configs):,} of {len(points):,} points\n")
    return configs


def _is_replaced(holder: DictConfig, name: str) -> bool:
    """Return whether a value takes the place of what stands there, as Hydra would have it."""
    # what an interpolation stands for may be missing
    return name in holder and (
        OmegaConf.is_interpolation(holder, name) or isinstance(holder[name], _REPLACED)
    )


def _clock(count: int, composed: Callable[[], int]) -> Callable[[], bool]:
    """Return a function that says whether progress is due: by compositions, and of many points by time."""
    reported, due = 0, time.monotonic()
    if count > _MANY:
        sys.stderr.write(f"acbench: composing {count:,} points\n")

    def is_due() -> bool:
        nonlocal reported, due
        if composed() < reported + _REPORTED and (count <= _MANY or time.monotonic() < due + _PAUSE_S):
            return False
        reported, due = composed(), time.monotonic()
        return True

    return is_due


def _others(keys: Sequence[str], key: str) -> list[str]:
    """Return the keys of the other overrides of a point; one that is there twice is its own other."""
    others = list(keys)
    others.remove(key)
    return others


def _overlap(key: str, other: str) -> bool:
    """Return whether two overrides touch the same node, or one touches what is in the other's."""
    one, two = (f"{re.split('[/@]', each)[0]}." for each in (key, other))
    return one.startswith(two) or two.startswith(one)


def _holder(config: DictConfig, path: Sequence[str]) -> DictConfig | None:
    """Return the mapping at a path; `None` where there is none, or it is that of another path."""
    for name in path:
        if name not in config or OmegaConf.is_interpolation(config, name):
            return None
        found = config[name]
        if not isinstance(found, DictConfig):
            return None
        config = found
    return config


def _is_value(override: Override) -> bool:
    """Return whether an override sets a name, at the top or in a group, to a plain value."""
    return (
        override.type in {OverrideType.CHANGE, OverrideType.FORCE_ADD}
        and override.package is None
        and _KEY.fullmatch(override.key_or_group) is not None
        and not override.is_sweep_override()
        and isinstance(override.value(), _PLAIN)
        and "${" not in str(override.input_line)
    )
