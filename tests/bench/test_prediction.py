"""The bench names every quantity in which a prediction and a measurement differ."""

from __future__ import annotations

from dataclasses import replace

from bench.prediction import differences
from tests.harness.records_fixture import record


def test_what_differs_is_named_with_its_error() -> None:
    measured = record()
    assert measured.memory is not None
    assert differences(measured, measured) == (0.0, {})
    peak = measured.memory.peak_bytes
    predicted = replace(measured, memory=replace(measured.memory, peak_bytes=2 * peak))
    assert differences(predicted, measured) == (1.0, {"peak_bytes": [2 * peak, peak]})
