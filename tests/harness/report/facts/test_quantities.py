"""Quantities: the path that a reader sees is that of the field that is read."""

from __future__ import annotations

import pytest

from harness.report.facts import quantities
from harness.report.facts.quantities import Quantity
from tests.harness.report.synthetic import sweep


@pytest.mark.parametrize(
    ("quantity", "path"),
    [
        pytest.param(quantities.PEAK, "memory/peak_bytes", id="a field"),
        pytest.param(quantities.BASELINE_PEAK, "memory/baseline/peak_bytes", id="a field that can miss"),
        pytest.param(
            quantities.PEAK_SHARE, "memory/peak_bytes : memory/baseline/peak_bytes", id="a quotient"
        ),
        pytest.param(quantities.rank_peak(3), "memory/by_rank/3/peak_bytes", id="an item of a list"),
        pytest.param(
            quantities.collective_count("forward", "all_gather"),
            "work/collectives/forward/all_gather",
            id="an item of an object",
        ),
        pytest.param(
            quantities.timeline_bytes("{moment}"),
            "memory/timeline/{moment}/bytes",
            id="an item that a column of a figure names",
        ),
        pytest.param(quantities.chunk_option("fraction"), "experiment/chunk/fraction", id="an option"),
    ],
)
def test_paths(quantity: Quantity, path: str) -> None:
    assert quantity.path == path


def test_what_a_record_lacks_is_none() -> None:
    refused = next(record for record in sweep(10) if record.status == "refused")
    measured = next(record for record in sweep(10) if record.memory is not None)
    assert quantities.PEAK.of(refused) is None
    assert quantities.collective_count("forward", "broadcast").of(measured) is None
    assert quantities.PEAK.of(measured) == measured.to_dict()["memory"]["peak_bytes"]
