"""Points as the command line makes them, composed in this process; on CPU unless they say otherwise."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from harness.command_line import cli, hydra_words
from harness.command_line.schema import experiment_fields, hardware_of, settings, swept_variants
from harness.errors import ConfigError
from harness.experiment.experiment import Experiment
from harness.launchers.local import Local
from harness.launchers.task import Point
from harness.models.base import ModelSpec
from harness.models.python import PythonSpec
from harness.trial.preflight import Preflight, Refusal, built_refusal

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"


def composed(overrides: Sequence[str]) -> DictConfig:
    """Return what Hydra composes; it composes once what is no plain value, nor an option of a group."""
    values = [word for word in overrides if _is_value(word)]
    choices = [word for word in overrides if word not in values]
    groups = [word.partition("=")[0] for word in choices]
    config = by_hydra(())
    if len(config.keys() & groups) == len(choices) and all(_option(word).is_file() for word in choices):
        for group, word in zip(groups, choices, strict=True):
            config[group] = OmegaConf.load(_option(word))
    else:
        config = by_hydra(choices)
    ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(values), config)
    return config


def by_hydra(overrides: Iterable[str]) -> DictConfig:
    """Return what Hydra composes, once."""
    config: DictConfig = pickle.loads(_pickled(tuple(overrides)))
    return config


@cache
def _pickled(overrides: tuple[str, ...]) -> bytes:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return pickle.dumps(compose("config", overrides=list(overrides)))


def _option(word: str) -> Path:
    """Return the file of the option that an override chooses, if it does."""
    return CONF / f"{word.replace('=', '/', 1)}.yaml"


def _is_value(word: str) -> bool:
    """Whether an override sets a value that is there, and so chooses nothing; a name may be of a group."""
    name = word.partition("=")[0]
    return name.replace(".", "").isidentifier() and not (CONF / name).is_dir()


def point_of(line: str, *, is_swept: bool = False) -> Point:
    """Return the point of a command without quotes, `acbench <line>`."""
    return _point(composed(_words(line)), swept_variants([]) if is_swept else None)


def experiment_of(line: str) -> Experiment:
    found = point_of(line)
    assert found.experiment is not None, str(found.refusal)
    return found.experiment


def refusal_of(line: str) -> str:
    """Return what the command line says about a command that it refuses."""
    try:
        config = composed(_words(line))
        settings(config)
        refusal = _point(config).refusal
    except (HydraException, ConfigError) as error:
        return hydra_words.explained(error)
    assert refusal is not None, f"nothing is wrong with {line!r}"
    return str(refusal)


def _point(config: DictConfig, swept: Mapping[str, set[str]] | None = None) -> Point:
    return cli.point(experiment_fields(config), hardware_of(config), Local(), _preflight(), swept=swept)


def _preflight() -> Preflight:
    """Return the checks of one command; what they find of a model of ours is remembered for all."""
    return Preflight(built=_built)


def _built(check: str, deadline_s: float, model: ModelSpec, *others: Any) -> Refusal:
    if isinstance(model, PythonSpec):
        return built_refusal(check, deadline_s, model, *others)
    key = repr((check, deadline_s, model, others))
    if key not in _refusals:
        _refusals[key] = built_refusal(check, deadline_s, model, *others)
    return _refusals[key]


_refusals: dict[str, Refusal] = {}


def rows(messages: Mapping[str, str]) -> list[Any]:
    """Return a table of commands and what is said about them, each row named by its command."""
    return [pytest.param(line, message, id=line) for line, message in messages.items()]


def lines(common: Mapping[str, str], further: Mapping[str, str]) -> list[Any]:
    """Return a table of commands by name; only `make matrix` runs the `further` ones."""
    few = [pytest.param(line, id=name) for name, line in common.items()]
    return few + [pytest.param(line, id=name, marks=pytest.mark.matrix) for name, line in further.items()]


def options_of(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def _words(line: str) -> list[str]:
    is_there = "mesh.device" in line or "~mesh" in line
    return line.split() if is_there else ["mesh.device=cpu", *line.split()]
