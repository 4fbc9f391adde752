"""Composing the points of a sweep: a choice is composed once, and points are patched together from choices.

Hydra composes a point from nothing, 50 ms each. But most options of a group are *plain*: their file has no
defaults list and no package of its own, so it decides the subtree of its group and nothing else. Points that
differ in plain choices share one composition, in which only these subtrees are exchanged. Whatever else is
chosen (a preset, an option that pulls others in, an added or deleted group) has a composition of its own.
Overrides of values then apply by Hydra's own function. What cannot be patched, errors included, is composed
in full.

Hydra imports this module in every Hydra application of the environment, so it imports nothing of the harness.
"""

from __future__ import annotations

import copy
import pickle
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.config_loader import ConfigLoader
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import Container, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

_WRONG_OVERRIDE = (HydraException, OmegaConfBaseException, ValueError)
"""What Hydra raises about one; some it refuses with a plain `ValueError`."""


def compose_all(
    loader: ConfigLoader, master: DictConfig, job_overrides: Sequence[Sequence[str]]
) -> list[DictConfig]:
    """Return the configuration of every point, as tasks of Hydra receive it: without the node `hydra`.

    Each is what `loader.load_sweep_config(master, overrides)` returns, without that node.

    Args:
        loader: Hydra's.
        master: the configuration of the sweep, with its node `hydra`.
        job_overrides: the overrides of each point.

    Raises:
        HydraException, ValueError: what `load_sweep_config` raises about the first point that is wrong.
    """
    assert isinstance(loader, ConfigLoaderImpl)
    composer = _Composer(loader, master)
    return [composer.compose(overrides) for overrides in job_overrides]


class _Composer:
    """Composes the points of one command, whose files are read once."""

    def __init__(self, loader: ConfigLoaderImpl, master: DictConfig) -> None:
        self._loader = loader
        self._master = master
        self._parser = OverridesParser.create()
        self._parsed: dict[str, Override] = {}
        self._common = [self._parse(line) for line in master.hydra.overrides.hydra]
        self._repository = CachingConfigRepository(loader.repository)
        loader._process_config_searchpath(self._config_name, self._common, self._repository)  # noqa: SLF001 (the search path of the command)
        self._is_group: dict[str, bool] = {}
        self._chosen_before: dict[tuple[str | None, ...], bytes] = {}
        self._options: dict[tuple[str, str], Container | None] = {}
        self._bases: dict[tuple[tuple[str | None, ...], frozenset[str]], DictConfig | frozenset[str]] = {}

    def compose(self, lines: Sequence[str]) -> DictConfig:
        """Return the configuration of a point."""
        try:
            overrides = [self._parse(line) for line in lines]
            if not any(_is_beyond(override) for override in overrides):
                return self._patched(overrides)
        except _WRONG_OVERRIDE:
            pass  # full composition says what is wrong, in its own words
        return self._in_full(lines)

    @property
    def _config_name(self) -> str | None:
        name: str | None = self._master.hydra.job.config_name
        return name

    def _parse(self, line: str) -> Override:
        if line not in self._parsed:
            if "${" in line:
                OmegaConf.create([line])  # full composition keeps the line itself, which then has to be sound
            (self._parsed[line],) = self._parser.parse_overrides([line])
        return self._parsed[line]

    def _in_full(self, lines: Sequence[str]) -> DictConfig:
        config = self._loader.load_sweep_config(self._master, list(lines))
        with open_dict(config):
            del config["hydra"]
        return config

    def _patched(self, overrides: Sequence[Override]) -> DictConfig:
        choices = [override for override in overrides if self._is_choice(override)]
        config = self._chosen(choices)
        values = [override for override in overrides if not self._is_choice(override)]
        ConfigLoaderImpl._apply_overrides_to_config(values, config)  # noqa: SLF001 (Hydra's semantics and messages)
        return config

    def _is_choice(self, override: Override) -> bool:
        """Whether Hydra takes it for the choice of a group rather than for a value."""
        key = override.key_or_group
        if key not in self._is_group:
            self._is_group[key] = self._repository.group_exists(key)
        return self._is_group[key] and not isinstance(override.value(), dict)

    def _plain(self, choices: Sequence[Override]) -> dict[str, str]:
        """Return `{group: option}` of those choices that decide the subtree of their group alone."""
        groups = [choice.key_or_group for choice in choices]
        return {
            choice.key_or_group: str(choice.value())
            for choice in choices
            if choice.type is OverrideType.CHANGE
            and choice.package is None
            and groups.count(choice.key_or_group) == 1
            and self._option(choice.key_or_group, choice.value()) is not None
        }

    def _option(self, group: str, option: Any) -> Container | None:
        """Return the content of a plain option; `None` of any other."""
        if not isinstance(option, str):
            return None
        if (group, option) not in self._options:
            self._options[group, option] = self._read(f"{group}/{option}")
        return self._options[group, option]

    def _read(self, path: str) -> Container | None:
        found = self._repository.load_config(path)
        has_schema = self._repository.get_schema_source().is_config(path)
        if found is None or found.defaults_list or found.header["package"] is not None or has_schema:
            return None
        return found.config

    def _chosen(self, choices: Sequence[Override]) -> DictConfig:
        """Return the composition of `choices`, as the caller's own."""
        key = tuple(choice.input_line for choice in choices)
        if key not in self._chosen_before:
            self._chosen_before[key] = pickle.dumps(self._exchanged(choices, self._plain(choices)))
        config: DictConfig = pickle.loads(self._chosen_before[key])  # noqa: S301 (our own; a deepcopy takes 7 times as long)
        return config

    def _exchanged(self, choices: Sequence[Override], plain: Mapping[str, str]) -> DictConfig:
        """Return the composition of `choices`: one of other options, those of `plain` in their place."""
        others = tuple(choice.input_line for choice in choices if choice.key_or_group not in plain)
        key = others, frozenset(plain)
        if key not in self._bases:
            self._bases[key] = self._not_alone(choices, plain) or self._in_full(
                [str(choice.input_line) for choice in choices]
            )
        base = self._bases[key]
        if isinstance(base, frozenset):
            return self._exchanged(choices, {group: plain[group] for group in plain if group not in base})
        config = copy.deepcopy(base)
        for group, option in plain.items():
            config[group] = self._options[group, option]
        return config

    def _not_alone(self, choices: Sequence[Override], plain: Mapping[str, str]) -> frozenset[str]:
        """Return the groups of `plain` whose choice decides more than its subtree, or not all of it.

        A preset can write into the subtree too. An interpolated defaults list chooses by choices, and a
        mapping that is merged into an interpolation is merged into a copy of what that stands for.
        """
        parts: defaultdict[Any, list[tuple[ResultDefault, Any]]] = defaultdict(list)
        for default in self._defaults(choices):
            found = self._repository.load_config(str(default.config_path))
            if found is None or "${" in str(found.defaults_list):
                return frozenset(plain)
            content = self._loader._load_single_config(default, self._repository).config  # noqa: SLF001 (in its package)
            for name in content:
                parts[name].append((default, content._get_node(name)))  # noqa: SLF001 (unresolved)
        parts.pop("hydra", None)
        shared = [nodes for group, nodes in parts.items() if group not in plain and len(nodes) > 1]
        if any("${" in str(node) for nodes in shared for _, node in nodes):
            return frozenset(plain)
        return frozenset(
            group for group in plain if [_place(default) for default, _ in parts[group]] != [(group, group)]
        )

    def _defaults(self, choices: Sequence[Override]) -> list[ResultDefault]:
        """Return what Hydra merges, in order."""
        return create_defaults_list(
            repo=self._repository,
            config_name=self._config_name,
            overrides_list=[*self._common, *choices],
            prepend_hydra=True,
            skip_missing=False,
        ).defaults


def _is_beyond(override: Override) -> bool:
    """Whether it concerns more than the configuration of a task, or is none of a single point."""
    return override.is_sweep_override() or re.split("[./]", override.key_or_group)[0] == "hydra"


def _place(default: ResultDefault) -> tuple[str | None, str | None]:
    return default.override_key, default.package
