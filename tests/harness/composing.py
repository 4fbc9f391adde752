"""Points as the command line makes them, composed in this process; on CPU unless they say otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig

from harness import cli
from harness.errors import ConfigError
from harness.experiment.experiment import Experiment
from harness.launchers.local import Local
from harness.launchers.task import Point
from harness.schema import settings
from harness.trial.preflight import Preflight

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"


def composed(overrides: Sequence[str]) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def point_of(line: str) -> Point:
    """Return the point of a command without quotes, `acbench <line>`."""
    return cli.point(composed(_words(line)), Local(), Preflight())


def experiment_of(line: str) -> Experiment:
    found = point_of(line)
    assert found.experiment is not None, str(found.refusal)
    return found.experiment


def refusal_of(line: str) -> str:
    """Return what the command line says about a command that it refuses."""
    try:
        config = composed(_words(line))
        settings(config)
        refusal = cli.point(config, Local(), Preflight()).refusal
    except (HydraException, ConfigError) as error:
        return cli._explain(error)
    assert refusal is not None, f"nothing is wrong with {line!r}"
    return str(refusal)


def rows(messages: Mapping[str, str]) -> list[Any]:
    """Return a table of commands and what is said about them, each row named by its command."""
    return [pytest.param(line, message, id=line) for line, message in messages.items()]


def options_of(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def _words(line: str) -> list[str]:
    is_there = "mesh.device" in line or "~mesh" in line
    return line.split() if is_there else ["mesh.device=cpu", *line.split()]
