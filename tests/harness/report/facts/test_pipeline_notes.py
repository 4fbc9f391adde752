from __future__ import annotations

from typing import Any

import pytest

from harness.records.record import Record
from harness.report.facts.pipeline_notes import pipeline_notes, stages_by_rank
from harness.report.facts.trial_notes import notes
from tests.harness.records_fixture import experiment, rank_result, record

_CAUSE = (
    "torch's checkpoint recomputes for each call of autograd, and a backward in two parts makes one for the "
    "input and one for each group of parameters"
)
_STAGES = {"in_flight": 4, "in_flight_weights": 4, "bytes_a_microbatch": 70_592}


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
    assert (list(pipeline_notes(told)), list(stages_by_rank(told))) == ([], [])


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ({"stages": [1], **_STAGES}, "stage 1: at most 4 forwards in flight, 68.9 KiB a forward, peak "),
        (
            {"stages": [0, 3], **_STAGES, "in_flight": 3},
            (
                "stages 0 and 3: at most 3 forwards in flight, 4 until the gradients of weights, 68.9 KiB a "
                "forward, peak "
            ),
        ),
    ],
    ids=["one stage", "two stages, whose weights come later"],
)
def test_the_stages_of_each_rank(stages: dict[str, Any], expected: str) -> None:
    ((rank, held),) = stages_by_rank(_record(4, weight=0, stages=stages))
    assert (rank, held[: len(expected)]) == ("rank 0", expected)
