"""Points as the command line makes them, composed in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from harness.cli import point
from harness.experiment import Experiment
from harness.launch import Point

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"


def composed(overrides: Sequence[str]) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def point_of(line: str) -> Point:
    """Return the point of a command without quotes, `acbench <line>`."""
    return point(composed(line.split()))


def experiment_of(line: str) -> Experiment:
    found = point_of(line)
    assert found.experiment is not None, str(found.refusal)
    return found.experiment


def options_of(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))
