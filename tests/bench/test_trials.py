"""A trial that fails in shared ranks takes no other result with it; records of a sweep fit into one file."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from bench import records as gathering
from bench.parity_matrix import problem
from bench.trials import PRELOAD, experiments, records
from harness.ranks.agent import Agent
from strategies.ac.full import Full

SIZES = (
    "model=mlp",
    "model.n_layers=1",
    "model.width=8",
    "data=synthetic",
    "batch_size=2",
    "sequence_length=4",
)


def test_one_failure_hides_no_other_result(tmp_path: Path) -> None:
    common = [*SIZES, "protocol=parity", "protocol.parity_steps=1"]
    good, bad = experiments([[*common, "ac=full"], [*common, "ac=full"]])
    ac = replace(cast("Full", bad.ac), layers_fqn="nowhere")
    with Agent(preload=PRELOAD) as agent:
        found = records(agent, [good, replace(bad, ac=ac)], tmp_path)
    assert [(record.status, record.verdict) for record in found] == [
        ("ok", "neutral"),
        ("failed", "unverified"),
    ]
    assert problem(found[0]) is None
    assert str(problem(found[1])).startswith("failed: ac.layers_fqn: ")


@pytest.mark.parametrize(
    "names", [pytest.param([], id="none is an error"), pytest.param(["b", "a"], id="in order")]
)
def test_gathers_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_text(json.dumps({"trial_id": name}), "utf-8")
    out = tmp_path / "all" / "records.json"
    monkeypatch.setattr(sys, "argv", ["records", str(tmp_path), "--out", str(out)])
    assert gathering.main() == int(not names)
    assert [record["trial_id"] for record in json.loads(out.read_text("utf-8"))] == sorted(names)
