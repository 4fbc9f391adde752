"""Trackers show what records say: one run a trial, once, in place of an earlier one of the trial.

Their stubs stand in for packages that the tests do not install; each refuses what the package would.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.errors import ConfigError
from harness.records.record import Record
from harness.records.store import Store
from harness.report.facts.flat_record import flat_config, flat_summary, tables
from harness.report.wandb import publisher
from harness.report.wandb.publisher import Published, Tracker, publish
from tests.harness.records_fixture import experiment, failed, record

STUBS = Path(__file__).parent / "stubs"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Return a store of two records, where the stubs are importable in this process and those it starts."""
    monkeypatch.syspath_prepend(str(STUBS))
    monkeypatch.setenv("PYTHONPATH", f"{STUBS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    found = Store(tmp_path / "two words")
    for each in (record(), failed("oom", experiment("none"))):
        found.write(each)
    return found


def trackio_runs(store: Store) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((store.root / "trackio" / "ours.json").read_text("utf-8"))
    return found


def mlflow_runs(store: Store) -> list[dict[str, Any]]:
    kept = json.loads((store.root / "mlflow" / "mlflow.db").read_text("utf-8"))
    return list(kept["runs"].values())


def publish_all(store: Store, name: str, published: int = 2) -> None:
    shown = {"trackio": "trackio", "mlflow": "MLflow"}[name]
    expected = Published(
        published=published, remaining=0, folder=store.root / name, problem=None, tracker=shown
    )
    assert publish(store, Tracker(name=name, project="ours")) == expected
    assert str(expected) == f"{shown}: {published} published, files in {store.root / name}"


def of(store: Store, status: str) -> Record:
    return next(each for each in store.scan().records if each.status == status)


def test_a_run_of_trackio_equals_its_record(store: Store) -> None:
    publish_all(store, "trackio")
    ok = of(store, "ok")
    run = next(each for each in trackio_runs(store) if each["config"]["status"] == "ok")
    assert run["name"] == f"{ok.trial_id} full on single, gpt_nano"
    assert run["group"] == ok.name
    assert run["config"] == json.loads(json.dumps({**flat_config(ok), "status": "ok", "verdict": "neutral"}))
    *history, summary = run["logged"]
    assert ok.parity is not None
    assert [row["loss"] for row in history if "loss" in row] == list(ok.parity.losses)
    assert [row["step"] for row in history] == list(range(len(history)))
    shown = {name: {"columns": list(of), "data": rows} for name, (of, rows) in tables(ok).items()}
    assert summary == json.loads(json.dumps({"step": None, **flat_summary(ok), **shown}))


def test_a_run_of_mlflow_equals_its_record(store: Store) -> None:
    publish_all(store, "mlflow")
    ok = of(store, "ok")
    run = next(each for each in mlflow_runs(store) if dict(each["tags"])["status"] == "ok")
    assert (run["name"], run["status"]) == ("full on single, gpt_nano", "FINISHED")
    tags = {"acbench.trial_id": ok.trial_id, "sweep": ok.name, "verdict": "neutral"}
    assert tags.items() <= dict(run["tags"]).items()
    assert dict(run["params"]) == {name: str(value) for name, value in flat_config(ok).items()}
    numbers = {name: value for name, value in flat_summary(ok).items() if isinstance(value, int | float)}
    last = {name: value for name, value, _, _ in run["metrics"]}
    assert numbers.items() <= last.items()
    assert ok.parity is not None
    losses = [(step, value) for name, value, _, step in run["metrics"] if name == "loss"]
    assert losses == list(enumerate(ok.parity.losses))
    assert run["files"] == ["blocks.json", "largest_saved.json", "record.json"]


@pytest.mark.parametrize(("name", "runs"), [("trackio", trackio_runs), ("mlflow", mlflow_runs)])
def test_a_record_is_published_once_and_another_one_takes_its_place(
    store: Store, name: str, runs: Any
) -> None:
    publish_all(store, name)
    publish_all(store, name, published=0)
    store.write(replace(of(store, "ok"), finished_at="2026-11-26T00:00:00+00:00"))
    publish_all(store, name, published=1)
    assert len(runs(store)) == 2


@pytest.mark.parametrize("name", ["trackio", "mlflow"])
def test_a_tracker_whose_package_is_missing_is_refused_by_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "_PACKAGES", {name: ("no_such_package",)})
    with pytest.raises(ConfigError) as refusal:
        Tracker(name=name)
    needed = f"needs the package 'no_such_package'; pip install 'acbench[{name}]', or tracker=none"
    assert str(refusal.value) == f"tracker: {needed}"


def test_an_account_of_wandb_is_for_wandb(store: Store) -> None:
    assert store.root.is_dir()
    with pytest.raises(ConfigError) as refusal:
        Tracker(name="mlflow", entity="us")
    assert str(refusal.value) == "tracker.entity: is an account of W&B; leave it out for mlflow"
