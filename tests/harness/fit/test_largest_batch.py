"""The largest batch that fits, and how many steps are traced for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.fit.largest_batch import largest_batch
from harness.records.measured import MeasuredMemory


def memory(peak: int, activations: int) -> MeasuredMemory:
    return MeasuredMemory(
        saved_bytes=activations,
        peak_bytes=peak,
        activation_peak_bytes=activations,
        peak_phase="forward",
        peak_module="",
        parameter_bytes=peak - activations,
        gradient_bytes=0,
        optimizer_bytes=0,
    )


@pytest.mark.parametrize(
    ("needed", "known", "limit", "unit", "expected", "most_traces"),
    [
        pytest.param(lambda b: 100 + 10 * b, 8, 250, 1, 15, 1, id="a line"),
        pytest.param(lambda b: 100 + 10 * b, 8, 255, 4, 12, 1, id="a batch that ranks share"),
        pytest.param(lambda b: 100 + 10 * b, 8, 180, 1, 8, 1, id="the batch that is known"),
        pytest.param(lambda b: 100 + 10 * b, 8, 105, 1, 0, 1, id="none"),
        pytest.param(lambda b: 140 + 10 * max(b - 4, 0) + 12 * b, 8, 500, 1, 18, 3, id="a line with a bend"),
        pytest.param(lambda _: 100, 8, 500, 1, 1 << 20, 2, id="bytes that do not grow"),
    ],
)
def test_the_largest_batch(
    needed: Callable[[int], int], known: int, limit: int, unit: int, expected: int, most_traces: int
) -> None:
    traced: list[int] = []

    def memory_of(size: int) -> int:
        traced.append(size)
        return needed(size)

    seen = memory(needed(known), needed(known) - needed(0))
    assert largest_batch(seen, known, limit, unit, memory_of) == expected
    assert len(traced) <= most_traces
    assert needed(expected) <= limit or expected == 0
