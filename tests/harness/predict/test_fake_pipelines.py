"""What a pipeline is predicted to need is what its ranks measure (`tests/harness/trial/test_pipeline.py`)."""

from __future__ import annotations

import pytest

from harness.predict.prediction import predict
from tests.harness.trial.test_pipeline import HAS_THESE_PEAKS, MEASURED, pipelined

_MARK = {("full", "1f1b"): pytest.mark.slow}
_ROWS = [pytest.param(*row, marks=_MARK.get(row[:2], pytest.mark.matrix)) for row in MEASURED]


@pytest.mark.parametrize(("variant", "schedule", "left", "peaks", "forwards"), _ROWS)
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
