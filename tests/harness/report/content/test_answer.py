# ruff: noqa: RUF001 (times, as reports write it)
"""The answer follows from the numbers: what was trained, saves most, is quickest, went wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.records.record import Record
from harness.report.content.answer import differing
from harness.report.content.contents import document
from harness.report.facts.document import plain
from harness.report.facts.fields_read import as_read
from harness.report.facts.sweep_records import sweep_of
from tests.harness.records_fixture import PARTS, experiment, failed, rank_result, record, trial

HERE = "gpt_nano with 2.0 MiB of parameters, fp32, on cpu: 1 rank (single)."
MIB = 1_048_576


def noisy(ac: str, peak: int, steps_s: list[float]) -> Record:
    return trial(ac, peak, 1.0, time={"variant_s": steps_s, "twin_s": [1.0] * len(steps_s)})


def on_cpu(ac: str, peak: int, step_s: float) -> Record:
    return trial(ac, peak, step_s, memory={"peak_bytes": peak, "host_peak_bytes": MIB})


def lines(*records: Record, waiting: int = 0) -> list[str]:
    names = [f"{number:012x}" for number in range(waiting)]
    content = document(sweep_of(records, name="demo", waiting=names))
    return [plain(statement.line) for statement in content.statements]


def claims(*records: Record, waiting: int = 0) -> list[str]:
    """Return the sentences after the advice, which has tests of its own."""
    return [
        line for line in lines(*records, waiting=waiting) if " use " not in f" {line[0].lower()}{line[1:]}"
    ]


def test_five_sentences_say_what_to_use_was_trained_is_best_and_how_it_ended() -> None:
    assert lines(
        trial("none", 20 * MIB, 1.0),
        trial("full", 10 * MIB, 1.3),
        trial("nested", 10 * MIB, 1.2),
        trial("selective_op", 15 * MIB, 1.0),
        trial("selective_op", 15 * MIB, 1.0, "shard2"),
    ) == [
        (
            "On single and shard2, use selective_op: 25% less peak memory at 1.00× [1.00, 1.00] the step "
            "time, which cannot be told from the plain model's."
        ),
        "gpt_nano with 2.0 MiB of parameters, fp32, on cpu: 1 rank (single), 2 ranks (shard2).",
        (
            "On single, nested saves 50% of the peak memory (10.0 MiB of 20.0 MiB) at 1.20× [1.20, 1.20] "
            "the step time: the lowest peak of 4 trials."
        ),
        (
            "selective_op saves 25% of the peak memory (15.0 MiB of 20.0 MiB) at 1.00× [1.00, 1.00] the "
            "step time, which cannot be told from the plain model's: the quickest that saves."
        ),
        "5 trials: 5 ok, 5 neutral.",
    ]


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        pytest.param(
            [trial("full", 10 * MIB, 1.25), trial("nested", 10 * MIB, 1.25)],
            [
                (
                    "full saves 50% of the peak memory (10.0 MiB of 20.0 MiB) at 1.25× [1.25, 1.25] the step "
                    "time: the lowest peak of 2 trials, shared with nested (1.25× [1.25, 1.25])."
                )
            ],
            id="a tie",
        ),
        pytest.param(
            [noisy("full", 10 * MIB, [1.2, 1.3] * 4), noisy("nested", 15 * MIB, [1.1, 1.25] * 4)],
            [
                (
                    "full saves 50% of the peak memory (10.0 MiB of 20.0 MiB) at 1.25× [1.20, 1.30] the step "
                    "time: the lowest peak of 2 trials."
                ),
                (
                    "nested saves 25% of the peak memory (15.0 MiB of 20.0 MiB) at 1.18× [1.10, 1.25] "
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
                    "full saves 50% of the peak memory (10.0 MiB of 20.0 MiB) at 1.50× [1.50, 1.50] the step "
                    "time: the lowest peak of 3 trials."
                ),
                (
                    "offload saves 20% of the peak memory (16.0 MiB of 20.0 MiB) at 1.13× "
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
                    "full saves 50% of the peak memory (10.0 MiB of 20.0 MiB) at 1.25× [1.25, 1.25] the "
                    "step time."
                ),
                "nested saves 75% of the peak memory (5.0 MiB of 20.0 MiB); its time was not measured.",
            ],
            id="the lowest was not timed",
        ),
        pytest.param(
            [record(experiment("full"), rank_result() | {"parity": None})],
            [
                (
                    "full (unverified) saves 50% of the peak memory (10.0 MiB of 20.0 MiB) at 1.25× "
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
        pytest.param(
            [trial("full", 10 * MIB, 1.25), on_cpu("offload", 5 * MIB, 1.1)],
            [
                (
                    "full saves 50% of the peak memory (10.0 MiB of 20.0 MiB) at 1.25× [1.25, 1.25] the step "
                    "time."
                )
            ],
            id="what a GPU would save",
        ),
        pytest.param(
            [trial("none", 20 * MIB, 1.0), on_cpu("offload", 5 * MIB, 1.1)],
            ["the plain model needs 20.0 MiB."],
            id="nothing but what a GPU would save",
        ),
        pytest.param(
            [trial("full", 10 * MIB, 1.25, time={"variant_s": []})],
            ["full saves 50% of the peak memory (10.0 MiB of 20.0 MiB); its time was not measured."],
            id="nothing was timed",
        ),
    ],
)
def test_claims_follow_from_the_numbers(records: list[Record], expected: list[str]) -> None:
    assert claims(*records)[: len(expected) + 1] == [HERE, *expected]


def test_the_baseline_of_a_sharding_is_named() -> None:
    alone = experiment("none", "tp2", shard={"name": "megatron"})
    found = claims(record(experiment("none", "tp2")), record(alone))
    assert "of the peak memory of shard=none on the same mesh (" in found[1]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({"batch_size": 8}, "parameters, batch size 8, fp32", id="samples of its own"),
        pytest.param(
            {"batch_size": 8, "sequence_length": 32, "model": {"vocab_size": 256}, "optimizer": "sgd"},
            "parameters, batch size 8, sequence length 32, fp32, sgd, on cpu",
            id="tokens",
        ),
        pytest.param({"dtype": None}, "parameters, on cpu", id="dtypes of its own"),
        pytest.param(
            {"mesh": {"dp_shard": 2}}, "parameters a rank, fp32, on cpu: 2 ranks", id="parts of a model"
        ),
        pytest.param(
            {"mesh": {"dp_shard": 2, "cp": 2, "ep": 2}},
            "parameters a rank, fp32, on cpu: 4 ranks",
            id="parts of sequences, and experts on the same ranks",
        ),
    ],
)
def test_what_was_trained_stands_first(changes: dict[str, Any], expected: str) -> None:
    assert expected in claims(record(experiment(**changes)))[0]


def test_recipes_are_answered_apart() -> None:
    recipes = [experiment(ac, dtype=dtype) for ac in ("full", "nested") for dtype in ("fp32", "bf16")]
    content = document(sweep_of([record(each) for each in recipes], name="demo"))
    assert [chapter.title for chapter in content.chapters] == ["gpt_nano, dtype=bf16", "gpt_nano, dtype=fp32"]
    assert [len(chapter.trial_ids) for chapter in content.chapters] == [2, 2]


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
    content = document(sweep_of([other, record(experiment("nested"))], name="demo"))
    assert [chapter.title for chapter in content.chapters] == [f"gpt_nano, {each}" for each in expected]


def test_wrong_mathematics_and_inaction_are_part_of_the_answer() -> None:
    first = {"name": "layers.0.weight", "index": [3], "rank": 0, "step": 0, "expected": 0.5, "actual": 0.25}
    different = {"equal": False, "max_abs": 1.0, "max_rel": 1.0, "first_difference": first}
    assert claims(
        trial("full", 1, 1.0, parity={PARTS[2]: different}),
        trial("selective_op", 1, 1.0, observation={"named": ["mm"], "never_fired": ["mm"]}),
    ) == [
        HERE,
        (
            "2 trials: 2 ok, 1 differs, 1 inert; full on single differs from the plain model: gradient of "
            "'layers.0.weight' differs first at (3,) on rank 0 in step 0: 0.5000 vs 0.2500; selective_op on "
            "single does nothing: never fired: mm."
        ),
    ]


def test_a_sweep_that_only_failed_or_waits_says_how_and_why() -> None:
    ooms = [failed("oom", experiment("full", dtype=dtype)) for dtype in ("fp32", "bf16", "bf16_mixed")]
    found = claims(*ooms, failed("lost", experiment("none"), message="rank 1 is gone"), waiting=3)
    assert found[-1] == (
        "4 trials: 3 oom, 1 lost, 4 unverified; 3 without a record yet; full dtype=bf16 on single and 2 "
        "more: oom, ValueError: no."
    )


def test_an_empty_sweep_has_an_answer_too() -> None:
    assert claims() == ["0 trials."]


@pytest.mark.parametrize(
    ("experiments", "expected"),
    [
        pytest.param([experiment(), experiment()], "", id="nothing"),
        pytest.param(
            [experiment("full"), experiment("none", "shard2", seed=3)],
            "Trials differ in ac: full, none; mesh: shard2, single; seed: 0, 3.",
            id="groups and fields",
        ),
        pytest.param(
            [experiment(model={"width": width}) for width in range(9)],
            "Trials differ in model.width: 0, 1, 2, 3, 4, 5 and 3 more.",
            id="many values of an option",
        ),
        pytest.param(
            [experiment("s", ac={"k": 1}), experiment("s", ac={"k": 2}), experiment("full")],
            "Trials differ in ac: full, s; ac.k: 1, 2.",
            id="an option of one choice",
        ),
    ],
)
def test_fields_that_differ_are_said(experiments: list[dict[str, Any]], expected: str) -> None:
    assert plain(differing(as_read([record(each) for each in experiments]))) == expected
