from __future__ import annotations

from typing import Any

import pytest

from harness.measure.memory.locator import ASKERS
from harness.records.measured import StagesInFlight
from harness.records.record import Record
from harness.report.facts.pipeline_notes import forwards_of_blocks, pipeline_notes
from harness.report.facts.trial_notes import notes
from tests.harness.records_fixture import experiment, rank_result, record

_CAUSE = (
    "torch's checkpoint recomputes for each call of autograd, and a backward in two parts makes one for the "
    "input and one for each group of parameters"
)
_STAGES: dict[str, Any] = {"in_flight": 4, "in_flight_weights": 4, "bytes_a_microbatch": 70_592}


def _record(
    calls: int, *, weight: int, stages: dict[str, Any] | None = None, microbatches: int = 4
) -> Record:
    result = rank_result()
    result["work"] |= {"calls": {"layers.0": calls}, "recomputations": {"weight": weight}}
    result["pipeline"] = stages
    resolved = experiment("full") | {"microbatches": microbatches}
    return record(resolved, result)


@pytest.mark.parametrize(
    ("calls", "weight", "expected"),
    [
        (4, 0, []),
        (8, 0, []),
        (12, 0, ["recomputed 2 times, a block in each micro-batch"]),
        (44, 36, [f"recomputed 10 times, a block in each micro-batch: {_CAUSE}"]),
    ],
    ids=["never", "once", "twice, by nested regions", "for the input and for each group of parameters"],
)
def test_a_block_that_is_recomputed_more_than_once_is_told(
    calls: int, weight: int, expected: list[str]
) -> None:
    told = _record(calls, weight=weight, stages={"stages": [0], **_STAGES})
    assert list(pipeline_notes(told)) == expected
    assert [each for each in notes(told) if each.startswith("recomputed")] == expected


def test_a_recomputation_for_each_part_is_as_asked() -> None:
    told = _record(12, weight=4, stages={"stages": [0], **_STAGES})
    told.experiment["ac"]["split_backward"] = "again"
    why = "once for each part of a backward, as ac.split_backward=again says"
    assert list(pipeline_notes(told)) == [f"recomputed 2 times, a block in each micro-batch, {why}"]


def test_nothing_is_told_without_a_pipeline() -> None:
    told = _record(44, weight=0)
    assert list(pipeline_notes(told)) == []


@pytest.mark.parametrize(
    ("forwards", "expected"),
    [
        ({"layers.0": (4, 4, 0)}, "1 + 1 + 0 (layers.0)"),
        ({"layers.0": (4, 0, 4), "layers.4": (4, 4, 36)}, "1 + 0 + 1 (layers.0), 1 + 1 + 9 (layers.4)"),
        (
            {f"layers.{index}": (4, 2, 0) for index in range(3)},
            "1 + 0.5 + 0 (3 blocks from layers.0 to layers.2)",
        ),
        ({}, ""),
    ],
    ids=["one block", "two that run otherwise", "blocks alike", "a record of before"],
)
def test_forwards_of_blocks(forwards: dict[str, tuple[int, int, int]], expected: str) -> None:
    counts = {name: dict(zip(ASKERS, each, strict=True)) for name, each in forwards.items()}
    assert forwards_of_blocks(StagesInFlight(stages=(0,), forwards=counts, **_STAGES), 4) == expected
