from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.measure.step import StepReport, instrument
from harness.ranks.agent import Agent
from harness.records.fields import decode, encode
from harness.records.measured import Routing
from harness.records.record import Record
from harness.report.wandb.publisher import Tracker
from harness.sweep.launch import Run, run_sweep
from harness.trial.assemble import assemble
from harness.trial.batches import batches
from harness.trial.twin_step import TwinStep, is_repeatable
from tests.harness.composing import experiment_of, point_of

CPU = torch.device("cpu")
_SMALL = (
    "data=synthetic batch_size=2 sequence_length=32 model.width=32 model.hidden_width=64 "
    "protocol=smoke protocol.timed_pairs=0 protocol.parity_steps=1"
)
_USERS = "model=python model.factory=tests.harness.user_models:regression"


def _report() -> StepReport:
    experiment = experiment_of(_SMALL)
    batch = batches(experiment, CPU, 0)(0)
    return instrument(assemble(experiment, CPU, None, batch), batch)


def test_a_step_is_the_same_when_it_is_read() -> None:
    report, routing = _report(), [Routing(router="router", tokens=8, margin=0.1)]
    step = TwinStep.of(report, report.memory, routing)
    again = decode(TwinStep, json.loads(json.dumps(encode(step))), "")
    assert again == step
    peak_bytes = report.memory.peak_bytes * 3 // 4
    assert again.step.least_flops(peak_bytes, 0) == step.step.least_flops(peak_bytes, 0)


@pytest.mark.parametrize(
    ("line", "device", "expected"),
    [
        pytest.param("", "cpu", True, id="our model on a CPU"),
        pytest.param("mesh=shard2", "cpu", True, id="ranks"),
        pytest.param("", "cuda", False, id="an allocator that remembers"),
        pytest.param("compile=aot_eager", "cpu", False, id="compiled code"),
        pytest.param(_USERS, "cpu", False, id="code of the user's"),
        pytest.param(
            "ac=python ac.factory=examples.theirs:every_second", "cpu", False, id="a variant of the user's"
        ),
    ],
)
def test_what_each_trial_measures_alike(line: str, device: str, expected: bool) -> None:
    assert is_repeatable(experiment_of(line), torch.device(device)) == expected


@pytest.fixture(name="record")
def _record(tmp_path: Path, standing_agent: Agent) -> Callable[[str, str], Record]:
    def record(name: str, line: str) -> Record:
        run = Run(outputs_dir=str(tmp_path), name=name)
        point = point_of(f"{_SMALL} {line}")
        (found,) = run_sweep([point], run, Tracker(name="none"), agent=standing_agent).records
        return found

    return record


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("ac=full", id="one rank"),
        pytest.param("ac=full mesh=ep2 model=moe_nano", marks=pytest.mark.matrix, id="experts"),
    ],
)
def test_a_trial_records_the_same_with_the_step_of_an_earlier_one(
    record: Callable[[str, str], Record], line: str
) -> None:
    record("shared", line.replace("full", "none"))
    after, alone = record("shared", line), record("alone", line)
    assert _measured(after) == _measured(alone)


def _measured(record: Record) -> Record:
    """Return a record without what is the command's own."""
    return replace(record, name="", started_at="", finished_at="", environment={})


def test_the_step_of_an_earlier_trial_is_what_a_record_says_of_the_twin(
    record: Callable[[str, str], Record], tmp_path: Path
) -> None:
    record("shared", "ac=none")
    (path,) = (tmp_path / "shared").glob(".twin-*.json")
    step = json.loads(path.read_text())
    step["memory"]["saved_bytes"] += 1
    path.write_text(json.dumps(step))
    found = record("shared", "ac=full").memory
    assert found is not None
    assert found.baseline is not None
    assert found.baseline.saved_bytes == step["memory"]["saved_bytes"]
