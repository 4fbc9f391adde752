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
from collections.abc import Callable, Collection, Sequence
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
    def own_values(keys: Sequence[str]) -> set[str]:
        return _own_values(keys, is_group)

    @cache
    def pickled(lines: Sequence[str]) -> bytes:
        config = loader.load_sweep_config(master, list(lines))
        with open_dict(config):
            del config["hydra"]
        return pickle.dumps(config)  # a deepcopy for each point takes 7 times as long

    def point(lines: Sequence[str], plain: Collection[str]) -> DictConfig:
        """Return the configuration of a point.

        Args:
            plain: lines whose values are set on a configuration that is composed without them, if it has a
                place for each of them; the others are composed.
        """
        composed = tuple(line for line in lines if line not in plain)
        config: DictConfig = pickle.loads(pickled(composed))  # noqa: S301 (our own)
        taken = {parsed(line).key_or_group.rpartition(".")[0] for line in composed}
        places = {line: _place(config, parsed(line), taken) for line in plain}
        if None in places.values():
            return point(lines, [line for line, holder in places.items() if holder is not None])
        for line, holder in places.items():
            assert holder is not None, "it is none of those"
            with open_dict(holder):
                holder[parsed(line).key_or_group.rpartition(".")[2]] = parsed(line).value()
        return config

    is_due = _clock(len(points), lambda: pickled.cache_info().misses)
    configs = []
    for lines in points:
        own = own_values(tuple(parsed(line).key_or_group for line in lines))
        plain = [line for line in lines if parsed(line).key_or_group in own and _is_value(parsed(line))]
        configs.append(point(lines, plain))
        if is_due():
            sys.stderr.write(f"acbench: composed {len(configs):,} of {len(points):,} points\n")
    return configs


def _place(config: DictConfig, override: Override, taken: Collection[str]) -> DictConfig | None:
    """Return the mapping in which Hydra would put a value; `None` where Hydra must do that itself.

    Args:
        taken: paths of mappings to which other overrides of the point may add, in their order.
    """
    path, _, name = override.key_or_group.rpartition(".")
    holder = _holder(config, path.split(".") if path else [])
    if holder is None:
        return None
    if name not in holder:
        return holder if override.type is OverrideType.FORCE_ADD and path not in taken else None
    # what an interpolation stands for may be missing
    is_replaced = OmegaConf.is_interpolation(holder, name) or isinstance(holder[name], _REPLACED)
    return holder if is_replaced else None


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


def _own_values(keys: Sequence[str], is_group: Callable[[str], bool]) -> set[str]:
    """Return the keys of a point that name no group and that no other one touches but choices of groups."""

    def touches(key: str, other: str) -> bool:
        return _overlap(key, other) and not ("." not in other and is_group(other))

    return {
        key
        for key in keys
        if not is_group(key) and not any(touches(key, other) for other in _others(keys, key))
    }


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
