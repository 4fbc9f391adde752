from __future__ import annotations

from typing import Any

import pytest

from harness.record import Record
from harness.report.answer import answer
from harness.report.document import plain
from harness.report.front import Point, dominates, front
from harness.report.sweep import sweep_of
from harness.statistics import Ratio
from tests.harness.records_fixture import PARTS, experiment, failed, rank_result, record


def trial(ac: str, peak: int, step_s: float, /, mesh: str = "single", **changes: Any) -> Record:
    result = rank_result()
    result["memory"]["peak_bytes"] = peak
    result["time"] |= {"variant_s": [step_s] * 6, "twin_s": [1.0] * 6}
    for part, change in changes.items():
        result[part] |= change
    return record(experiment(ac, mesh), result)


def point(peak_bytes: int, median: float, spread: float = 0.0) -> Point:
    (entry,) = sweep_of([record()], name="demo").entries
    ratio = Ratio(median=median, low=median - spread, high=median + spread)
    return Point(entry=entry, peak_bytes=peak_bytes, ratio=ratio)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        pytest.param(point(1, 1.0), point(2, 1.1), True, id="less of both"),
        pytest.param(point(1, 1.0), point(2, 1.0), True, id="less memory, the same time"),
        pytest.param(point(1, 1.1), point(2, 1.0), False, id="less memory, more time"),
        pytest.param(point(1, 1.0), point(1, 1.1), True, id="the same memory, less time"),
        pytest.param(point(1, 1.0, 0.1), point(1, 1.1, 0.1), False, id="less time within the noise"),
        pytest.param(point(1, 1.0), point(1, 1.0), False, id="the same"),
        pytest.param(point(2, 0.5), point(1, 1.0), False, id="more memory"),
    ],
)
def test_dominance(one: Point, other: Point, expected: bool) -> None:
    assert dominates(one, other) is expected


def test_the_front_names_what_dominates_the_rest() -> None:
    records = [
        trial("none", 100, 1.0),
        trial("full", 40, 1.3),
        trial("offload", 40, 1.2),
        trial("nested", 20, 1.5),
    ]
    found = front(sweep_of(records, name="demo").entries)
    assert [each.entry.variant for each in found.best] == ["nested", "offload", "none"]
    assert {records[1].trial_id: "offload"} == {key: by.entry.variant for key, by in found.dominated.items()}


def test_what_differs_did_nothing_or_was_not_timed_is_on_no_front() -> None:
    different = {"equal": False, "max_abs": 1.0, "max_rel": 1.0, "first_difference": None}
    records = [
        trial("full", 1, 1.0, parity={PARTS[0]: different}),
        trial("selective_op", 1, 1.0, observation={"named": ["mm"], "never_fired": ["mm"]}),
        trial("offload", 1, 1.0, time={"variant_s": []}),
        failed("oom", experiment("nested")),
    ]
    assert {each.verdict for each in records} == {"differs", "inert", "neutral", "unverified"}
    assert front(sweep_of(records, name="demo").entries).points == ()


def lines(*records: Record, waiting: int = 0) -> list[str]:
    names = [f"{number:012x}" for number in range(waiting)]
    return [plain(claim.line) for claim in answer(sweep_of(records, name="demo", waiting=names))]


def test_the_answer_says_what_is_best_and_what_it_dominates() -> None:
    found = lines(
        trial("none", 20_971_520, 1.0),
        trial("full", 10_485_760, 1.3),
        trial("offload", 10_485_760, 1.2),
        trial("selective_op", 15_728_640, 1.0),
    )
    assert found == [
        (
            "On cpu, gpt_nano, 1 rank (single): offload keeps 50% of the peak memory (10.0 MiB of 20.0 MiB) "
            "at 1.20× [1.20, 1.20] the step time: the lowest peak of 4 trials."  # noqa: RUF001 (times)
        ),
        (
            "There, selective_op keeps 75% of the peak memory (15.0 MiB of 20.0 MiB) at a step time that "
            "cannot be told from the plain model's [1.00, 1.00]: the quickest that saves."
        ),
        "offload dominates full (10.0 MiB at 1.30× [1.30, 1.30]): neither less memory nor less time.",  # noqa: RUF001 (times)
        "4 trials: 4 ok, 4 neutral.",
    ]


def test_trials_on_other_meshes_are_answered_apart() -> None:
    found = lines(trial("full", 1_048_576, 1.3), trial("full", 1_048_576, 1.3, "shard2"))
    assert [line.partition(":")[0] for line in found[:2]] == [
        "On cpu, gpt_nano, 1 rank (single)",
        "On cpu, gpt_nano, 2 ranks (shard2)",
    ]


def test_without_times_memory_alone_is_answered() -> None:
    assert lines(trial("full", 10_485_760, 1.0, time={"variant_s": []})) == [
        (
            "On cpu, gpt_nano, 1 rank (single): full keeps 50% of the peak memory (10.0 MiB of 20.0 MiB); "
            "its time was not measured."
        ),
        "1 trial: 1 ok, 1 neutral.",
    ]


def test_a_sweep_that_only_failed_or_waits_says_how() -> None:
    assert lines(failed("oom"), failed("lost", experiment("none")), waiting=3) == [
        "2 trials: 1 oom, 1 lost, 2 unverified; 3 without a record yet."
    ]
