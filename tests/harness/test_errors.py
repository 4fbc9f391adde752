"""A missing extra is named in one sentence by what needs it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.errors import ConfigError, optional_package
from harness.launchers.slurm import Slurm
from harness.records.store import Store
from harness.report.formats import vega
from harness.report.wandb import publisher
from harness.report.wandb.publisher import Tracker, publish
from tests.harness.records_fixture import record


def test_an_installed_package_is_returned() -> None:
    assert optional_package("json", where="somewhere", extra="none").__name__ == "json"


def test_figures_name_the_extra_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(ConfigError) as refusal:
        vega.to_svg({}, {})
    assert str(refusal.value) == (
        "--format html,markdown: needs the package 'vl_convert'; "
        "install it with: pip install 'acbench[report]'"
    )


def test_slurm_names_the_extra_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ConfigError) as refusal:
        Slurm()
    assert str(refusal.value) == (
        "hydra/launcher: needs the package 'submitit'; install it with: pip install 'acbench[slurm]'"
    )


@pytest.fixture
def without_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "_PACKAGES", {"wandb": ("no_such_wandb",)})


@pytest.mark.usefixtures("without_wandb")
def test_an_online_tracker_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError) as refusal:
        Tracker(name="online")
    needed = "needs the package 'no_such_wandb'; pip install 'acbench[wandb]', or tracker=none"
    assert str(refusal.value) == f"tracker: {needed}"


@pytest.mark.usefixtures("without_wandb")
def test_an_offline_tracker_says_what_it_needs_and_keeps_the_records(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write(record())
    published = publish(store, Tracker(name="offline"))
    assert str(published) == (
        f"W&B: 0 published, files in {tmp_path / 'wandb'}; 1 not published, the same command tries again: "
        "needs the package 'no_such_wandb'; pip install 'acbench[wandb]', or tracker=none"
    )
    assert store.scan().records == (record(),)
