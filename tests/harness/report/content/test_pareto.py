# ruff: noqa: RUF001 (times, as reports write it)
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.records.record import Record
from harness.records.statistics import Ratio
from harness.report.content.answer import answer
from harness.report.content.pareto import TradeOff, dominates, pareto_front
from harness.report.facts.document import plain
from harness.report.facts.sweep_records import sweep_of
from tests.harness.records_fixture import PARTS, experiment, failed, rank_result, record


def trial(ac: str, peak: int, step_s: float, /, mesh: str = "single", **changes: Any) -> Record:
    result = rank_result()
    result["memory"]["peak_bytes"] = peak
    result["time"] |= {"variant_s": [step_s] * 6, "twin_s": [1.0] * 6}
    for part, change in changes.items():
        result[part] |= change
    return record(experiment(ac, mesh), result)


def point(peak_bytes: int, median: float, spread: float = 0.0) -> TradeOff:
    (entry,) = sweep_of([record()], name="demo").entries
    ratio = Ratio(median=median, low=median - spread, high=median + spread)
    return TradeOff(entry=entry, peak_bytes=peak_bytes, ratio=ratio)


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
def test_dominance(one: TradeOff, other: TradeOff, expected: bool) -> None:
    assert dominates(one, other) is expected


def test_the_front_names_what_dominates_the_rest() -> None:
    records = [
        trial("none", 100, 1.0),
        trial("full", 40, 1.3),
        trial("offload", 40, 1.2),
        trial("nested", 20, 1.5),
    ]
    found = pareto_front(sweep_of(records, name="demo").entries)
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
    assert pareto_front(sweep_of(records, name="demo").entries).points == ()


def lines(*records: Record, waiting: int = 0) -> list[str]:
    names = [f"{number:012x}" for number in range(waiting)]
    return [plain(statement.line) for statement in answer(sweep_of(records, name="demo", waiting=names))]


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
            "at 1.20× [1.20, 1.20] the step time: the lowest peak of 4 trials."
        ),
        (
            "There, selective_op keeps 75% of the peak memory (15.0 MiB of 20.0 MiB) at a step time that "
            "cannot be told from the plain model's [1.00, 1.00]: the quickest that saves."
        ),
        "offload dominates full (10.0 MiB at 1.30× [1.30, 1.30]): neither less memory nor less time.",
        "4 trials: 4 ok, 4 neutral.",
    ]


def test_trials_on_other_meshes_are_answered_apart() -> None:
    found = lines(trial("full", 1_048_576, 1.3), trial("full", 1_048_576, 1.3, "shard2"))
    assert [line.partition(":")[0] for line in found[:2]] == [
        "On cpu, gpt_nano, 1 rank (single)",
        "On cpu, gpt_nano, 2 ranks (shard2)",
    ]


HERE = "On cpu, gpt_nano, 1 rank (single): "
MIB = 1_048_576


def noisy(ac: str, peak: int, steps_s: list[float]) -> Record:
    return trial(ac, peak, 1.0, time={"variant_s": steps_s, "twin_s": [1.0] * len(steps_s)})


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        pytest.param(
            [trial("full", 10 * MIB, 1.25), trial("nested", 10 * MIB, 1.25)],
            [
                (
                    "full keeps 50% of the peak memory (10.0 MiB of 20.0 MiB) at 1.25× [1.25, 1.25] the step "
                    "time: the lowest peak of 2 trials, shared with nested (1.25× [1.25, 1.25])."
                )
            ],
            id="a tie",
        ),
        pytest.param(
            [noisy("full", 10 * MIB, [1.2, 1.3] * 4), noisy("nested", 15 * MIB, [1.1, 1.25] * 4)],
            [
                (
                    "full keeps 50% of the peak memory (10.0 MiB of 20.0 MiB) at 1.25× [1.20, 1.30] the step "
                    "time: the lowest peak of 2 trials."
                ),
                (
                    "There, nested keeps 75% of the peak memory (15.0 MiB of 20.0 MiB) at 1.18× [1.10, 1.25] "
                    "the step time: not clearly quicker than full."
                ),
            ],
            id="times within the noise",
        ),
        pytest.param(
            [
                trial("full", 10 * MIB, 1.5),
                noisy("nested", 15 * MIB, [1.1, 1.2] * 4),
                noisy("offload", 16 * MIB, [1.05, 1.21] * 4),
            ],
            [
                (
                    "full keeps 50% of the peak memory (10.0 MiB of 20.0 MiB) at 1.50× [1.50, 1.50] the step "
                    "time: the lowest peak of 3 trials."
                ),
                (
                    "There, offload keeps 80% of the peak memory (16.0 MiB of 20.0 MiB) at 1.13× "
                    "[1.05, 1.21] the step time: nothing that saves is clearly quicker."
                ),
            ],
            id="two that are quicker than the third",
        ),
        pytest.param(
            [trial("none", 20 * MIB, 1.0), trial("full", 25 * MIB, 0.9)],
            [
                (
                    "nothing timed saves peak memory; full needs 125% of the peak memory (25.0 MiB of "
                    "20.0 MiB) at 0.90× [0.90, 0.90] the step time."
                )
            ],
            id="quicker, but more memory",
        ),
        pytest.param(
            [trial("full", 10 * MIB, 1.25), trial("nested", 5 * MIB, 1.0, time={"variant_s": []})],
            [
                (
                    "full keeps 50% of the peak memory (10.0 MiB of 20.0 MiB) at 1.25× [1.25, 1.25] the "
                    "step time."
                ),
                (
                    "There, nested keeps 25% of the peak memory (5.0 MiB of 20.0 MiB); its time was not "
                    "measured."
                ),
            ],
            id="the lowest was not timed",
        ),
        pytest.param(
            [record(experiment("full"), rank_result() | {"parity": None})],
            [
                (
                    "full (unverified) keeps 50% of the peak memory (10.0 MiB of 20.0 MiB) at 1.25× "
                    "[1.25, 1.25] the step time."
                )
            ],
            id="unverified",
        ),
        pytest.param(
            [trial("none", 20 * MIB, 1.0)],
            ["the plain model needs 20.0 MiB; no other trial has numbers."],
            id="the plain model alone",
        ),
    ],
)
def test_claims_follow_from_the_numbers(records: list[Record], expected: list[str]) -> None:
    first, *others = expected
    assert lines(*records)[: len(expected)] == [HERE + first, *others]


def test_what_a_setting_shares_is_said_once() -> None:
    recipes = [experiment(ac, dtype=dtype) for ac in ("full", "nested") for dtype in ("fp32", "bf16")]
    found = lines(*(record(each) for each in recipes))
    assert [line.partition(" keeps")[0] for line in found[:2]] == [
        "On cpu, gpt_nano, 1 rank (single), dtype=bf16: full",
        "On cpu, gpt_nano, 1 rank (single), dtype=fp32: full",
    ]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        pytest.param({"torch": "2.12.0"}, ["torch 2.12.0", "torch 2.13.0"], id="versions"),
        pytest.param(
            {"commit": f"{'a' * 40}-dirty"}, ["commit aaaaaaaaaa-dirty", "commit None"], id="a commit"
        ),
        pytest.param({}, ["environment ffffffffffff", "environment 0123456789ab"], id="no name"),
    ],
)
def test_environments_are_told_apart(environment: dict[str, str], expected: list[str]) -> None:
    other = record(experiment("full"))
    other = replace(other, environment_id="f" * 12, environment=other.environment | environment)
    found = lines(other, record(experiment("nested")))
    assert [line.partition(", 1 rank (single), ")[2].partition(":")[0] for line in found[:2]] == expected


def test_wrong_mathematics_and_inaction_are_part_of_the_answer() -> None:
    first = {"name": "layers.0.weight", "index": [3], "rank": 0, "step": 0, "expected": 0.5, "actual": 0.25}
    different = {"equal": False, "max_abs": 1.0, "max_rel": 1.0, "first_difference": first}
    assert lines(
        trial("full", 1, 1.0, parity={PARTS[2]: different}),
        trial("selective_op", 1, 1.0, observation={"named": ["mm"], "never_fired": ["mm"]}),
    ) == [
        (
            "full on single differs from the plain model: gradient of 'layers.0.weight' differs first at "
            "(3,) on rank 0 in step 0: 0.5000 vs 0.2500."
        ),
        "selective_op on single does nothing: never fired: mm.",
        "2 trials: 2 ok, 1 differs, 1 inert.",
    ]


def test_without_times_memory_alone_is_answered() -> None:
    assert lines(trial("full", 10_485_760, 1.0, time={"variant_s": []})) == [
        (
            "On cpu, gpt_nano, 1 rank (single): full keeps 50% of the peak memory (10.0 MiB of 20.0 MiB); "
            "its time was not measured."
        ),
        "1 trial: 1 ok, 1 neutral.",
    ]


def test_a_sweep_that_only_failed_or_waits_says_how_and_why() -> None:
    ooms = [failed("oom", experiment("full", seed=seed)) for seed in range(3)]
    assert lines(*ooms, failed("lost", experiment("none"), message="rank 1 is gone"), waiting=3) == [
        "4 trials: 3 oom, 1 lost, 4 unverified; 3 without a record yet.",
        "full seed=0 on single and 2 more: oom, ValueError: no",
        "none seed=0 on single: lost, ValueError: rank 1 is gone",
    ]


def test_an_empty_sweep_has_an_answer_too() -> None:
    assert lines() == ["0 trials."]
