"""The record of a prediction is one that reports can read, with its numbers and no verdict on parity."""

from __future__ import annotations

import pytest

from harness.predict.prediction import predict, step_of
from harness.predict.trace import Times, Trace
from harness.records.record import Record, validate
from tests.harness.composing import experiment_of

_LINE = "model=mlp ac=full data=synthetic batch_size=2 sequence_length=8 model.n_layers=2 model.width=16"


@pytest.fixture(scope="module")
def record() -> Record:
    return predict(experiment_of(_LINE), seconds=lambda trace: Times(step_s=_flops(trace) / 1e6))


def _flops(trace: Trace) -> int:
    return sum(call.flops * count for call, count in trace.operators.items())


def test_it_is_a_record(record: Record) -> None:
    assert validate(record.to_dict()) == record
    assert (record.status, record.error, record.verdict) == ("predicted", None, "unverified")


def test_it_has_the_twin_beside_it(record: Record) -> None:
    assert record.memory is not None
    assert record.work is not None
    assert record.memory.baseline is not None
    assert record.memory.saved_bytes < record.memory.baseline.saved_bytes
    assert 0 < record.work.recomputed_flops < record.work.forward_flops


def test_its_time_is_that_of_its_trace(record: Record) -> None:
    assert record.work is not None
    assert record.time is not None
    flops = record.work.step_flops
    assert record.time.step_time_s.median == flops / 1e6


@pytest.mark.parametrize("mesh", ["single", "ddp2", "shard4"])
def test_tokens_are_those_of_a_device_and_of_the_job(mesh: str) -> None:
    experiment = experiment_of(f"{_LINE.replace('batch_size=2', 'batch_size=8')} mesh={mesh}")
    time = predict(experiment, seconds=lambda _: Times(step_s=0.5)).time
    assert time is not None
    assert time.job_tokens_per_s == 8 * 8 / 0.5
    assert time.tokens_per_s == 8 * 8 / 0.5 / experiment.mesh.world_size


def test_points_of_a_sweep_share_their_twin() -> None:
    points = [
        experiment_of(_LINE.replace("ac=full", f"ac={ac}")) for ac in ("full", "selective_layer", "none")
    ]
    full, layers, plain = (step_of(each) for each in points)
    assert all(step_of(each.twin()) is plain for each in points)
    assert full is not layers
