"""What a pipeline is predicted to need is what its ranks measure (`tests/harness/trial/test_pipeline.py`)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.predict.prediction import predict
from tests.harness.trial.test_pipeline import HAS_THESE_PEAKS, MEASURED, measured_in_stages, pipelined
from tests.rank_pool import RankPool


def test_two_small_stages_are_predicted_as_they_are_measured(pool2: RankPool) -> None:
    case = pipelined("full", "1f1b")
    case = replace(case, microbatches=2, model=replace(case.model, n_layers=2))  # type: ignore[call-arg]
    record, measured = predict(case, seconds=None), pool2.run(measured_in_stages, case)
    memory, work = record.memory, record.work
    assert memory is not None
    assert work is not None
    assert memory.pipeline is not None
    assert [each.bytes_a_microbatch for each in memory.pipeline] == [
        stages.bytes_a_microbatch for stages, _, _ in measured
    ]
    assert [each.activation_peak_bytes for each in memory.by_rank] == [peak for _, peak, _ in measured]
    counts = [tuple(counts.values()) for _, _, counts in measured]
    assert tuple(work.recomputations.values()) == tuple(map(max, zip(*counts, strict=True)))


@pytest.mark.matrix
@pytest.mark.parametrize(("variant", "schedule", "left", "peaks", "forwards"), MEASURED)
def test_bytes_and_forwards_of_ranks(
    variant: str,
    schedule: str,
    left: tuple[int, int],
    peaks: tuple[int, int],
    forwards: list[tuple[int, int, int]],
) -> None:
    record = predict(pipelined(variant, schedule), seconds=None)
    memory, work = record.memory, record.work
    assert memory is not None
    assert work is not None
    assert memory.pipeline is not None
    assert [each.rank for each in memory.by_rank] == [0, 1]
    assert tuple(each.bytes_a_microbatch for each in memory.pipeline) == left
    if HAS_THESE_PEAKS:
        assert tuple(each.activation_peak_bytes for each in memory.by_rank) == peaks
    assert tuple(work.recomputations.values()) == tuple(map(max, zip(*forwards, strict=True)))
    assert record.time is None
