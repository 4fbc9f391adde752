from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from harness.report.wandb import publisher
from harness.report.wandb.publisher import TRACKERS, Tracker

CONF = Path(__file__).parents[4] / "conf" / "tracker"


def test_every_tracker_has_a_file() -> None:
    assert {path.stem for path in CONF.glob("*.yaml")} == set(TRACKERS)


@pytest.mark.parametrize("name", TRACKERS)
def test_a_file_lists_every_option_with_its_default(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(publisher, "_missing", lambda _: "")  # extras that no test needs
    merged = OmegaConf.merge(OmegaConf.structured(Tracker), OmegaConf.load(CONF / f"{name}.yaml"))
    assert OmegaConf.to_object(merged) == Tracker(name=name)
    assert list(OmegaConf.load(CONF / f"{name}.yaml")) == list(asdict(Tracker()))
