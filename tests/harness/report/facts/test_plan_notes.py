from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.records.measured import TrainedModel
from harness.records.record import Record
from harness.report.content.figures.scatter import front_figure
from harness.report.content.tables import remarks
from harness.report.facts.baseline import of_baseline, of_baselines
from harness.report.facts.document import plain
from harness.report.facts.fields_read import as_read
from harness.report.facts.plan_notes import plan_notes
from harness.report.facts.sweep_records import sweep_of
from harness.report.facts.trial_notes import notes
from tests.harness.records_fixture import experiment, failed, rank_result, record

MIB = 1_048_576
_CHEAPEST = {"name": "cheapest", "flops_per_s": 3.12e14, "bandwidth_bytes_per_s": 3e11, "latency_s": 1e-5}
_WHOLE = {"embedding": "replicated", "head": "RR = RR x RR"}


def sharded(
    candidates: dict[str, str], communicated_bytes: int, /, dp_shard: int = 1, **shard: Any
) -> Record:
    resolved = experiment("none", "tp2", mesh={"dp_shard": dp_shard, "tp": 2}, shard=shard)
    plan = {"sharding": {"candidates": candidates, "communicated_bytes": communicated_bytes}}
    return replace(record(resolved), plan=plan)


def chunked(budget_bytes: int | None, /, ac: str = "none", regions: int = 1, name: str = "budget") -> Record:
    result = rank_result()
    result["observation"]["chunks"] = regions
    plan: dict[str, Any] | None = (
        {"chunk": {"budget_bytes": budget_bytes, "regions": [{}] * regions}} if regions else None
    )
    return replace(record(experiment(ac, chunk={"name": name}), result), plan=plan)


def planned(budget_bytes: int) -> Record:
    return replace(record(experiment("budget")), plan={"budget_bytes": budget_bytes})


_EXAMPLE = (
    "each of 2 data-parallel ranks computes the whole example; model.split_example=true shares its rows out"
)


def _reading(inputs: str) -> Record:
    trained = TrainedModel(elements={}, computes_in="float32", inputs=inputs)
    return replace(record(experiment("full", "shard2", mesh={"dp_shard": 2})), trained=trained)


def _replaced(*sentences: str) -> Record:
    return replace(record(), trained=TrainedModel(elements={}, computes_in="float32", replaced=sentences))


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        pytest.param(record(), [], id="no plan"),
        pytest.param(
            _replaced("dropout: 0.1 -> 0.0", "use_cache: True -> False"),
            ["not as the model's own code has it: dropout: 0.1 -> 0.0; use_cache: True -> False"],
            id="what stands in for the user's choice",
        ),
        pytest.param(_reading("example"), [_EXAMPLE], id="ranks that repeat one another's work"),
        pytest.param(_reading("example rows"), [], id="ranks that share the rows"),
        pytest.param(
            sharded(_WHOLE, 0, name="megatron"),
            ["nothing is sharded: every rank runs the whole model"],
            id="nothing is sharded",
        ),
        pytest.param(
            sharded(_WHOLE, 0, 2, **_CHEAPEST),
            [
                (
                    "nothing is sharded: every tensor-parallel rank runs the whole model; cheapest at "
                    "flops_per_s=3.12e+14 bandwidth_bytes_per_s=3e+11 latency_s=1e-05"
                )
            ],
            id="beside FSDP, by a machine",
        ),
        pytest.param(sharded(_WHOLE, 8, name="megatron"), [], id="something is communicated"),
        pytest.param(
            sharded(_WHOLE | {"up": "RS0 = RR x RS0"}, 0, name="candidate"), [], id="something is sharded"
        ),
        pytest.param(chunked(4 * MIB), [], id="a budget that is kept"),
        pytest.param(
            chunked(3 * MIB, "selective_op"),
            ["the budget of 3.0 MiB is not kept: 4.0 MiB with ac=selective_op"],
            id="a budget that AC breaks",
        ),
        pytest.param(
            chunked(4 * MIB - 1),
            ["the budget of 4,194,303 B is not kept: 4,194,304 B"],
            id="a budget missed by a byte",
        ),
        pytest.param(planned(10 * MIB), [], id="a plan's budget that is kept"),
        pytest.param(
            planned(5 * MIB),
            ["the budget of 5.0 MiB is not kept: 10.0 MiB"],
            id="a plan's budget that is broken",
        ),
        pytest.param(chunked(4 * MIB, regions=0), [], id="no chunk is needed, as the record says itself"),
        pytest.param(
            chunked(None, regions=0, name="minimum"),
            ["no chunk makes the activation peak lower"],
            id="no chunk helps",
        ),
        pytest.param(failed("oom", experiment(chunk={"name": "budget"})), [], id="no measurement"),
    ],
)
def test_what_a_plan_came_to(shown: Record, expected: list[str]) -> None:
    assert list(plan_notes(shown)) == expected
    said = [plain(statement.line) for statement in remarks(sweep_of([shown], name="demo"))]
    assert [remark in notes(shown) for remark in expected] == [True] * len(expected)
    assert [any(f": {remark}." in line for line in said) for remark in expected] == [True] * len(expected)


_ALONE = experiment("none", "tp2", shard={"name": "megatron"})
_UNDER_AC = experiment("full", "tp2", shard={"name": "megatron"})


@pytest.mark.parametrize(
    ("resolved", "expected"),
    [
        pytest.param(experiment(), "the plain model's", id="AC"),
        pytest.param(_ALONE, "that of shard=none on the same mesh", id="a sharding"),
        pytest.param(_UNDER_AC, "that of shard=megatron alone", id="AC on a sharding"),
    ],
)
def test_what_a_trial_is_compared_with(resolved: dict[str, Any], expected: str) -> None:
    assert plain(of_baseline(resolved)) == expected


@pytest.mark.parametrize(
    ("resolved", "expected"),
    [
        pytest.param([experiment("none")], ("the plain model's", "the plain model"), id="alone"),
        pytest.param([experiment(), experiment("nested")], ("the plain model's", "the plain model"), id="AC"),
        pytest.param(
            [experiment("none", "tp2"), _ALONE],
            ("that of shard=none on the same mesh", "shard=none on the same mesh"),
            id="shardings",
        ),
        pytest.param(
            [_ALONE, _UNDER_AC],
            (
                "the baseline's",
                "each trial's own baseline (shard=megatron alone, shard=none on the same mesh)",
            ),
            id="both",
        ),
    ],
)
def test_what_many_trials_are_compared_with(
    resolved: list[dict[str, Any]], expected: tuple[str, str]
) -> None:
    assert of_baselines(resolved) == expected


def test_the_figure_names_the_baseline_of_a_sharding() -> None:
    sweep = sweep_of([record(experiment("none", "tp2")), record(_ALONE)], name="demo")
    figure = front_figure(sweep)
    assert figure is not None
    assert "At 1 and 100 % is shard=none on the same mesh." in figure.about
    assert "plain model" not in str(figure)


def of_model(*, reads: str | None = None, **changes: Any) -> Record:
    result = rank_result()
    if reads is not None:
        result["trained"] = {"elements": {"float32": 8}, "computes_in": "float32", "inputs": reads}
    defaults = {"batch_size": 8, "sequence_length": 128}
    return record(experiment(**(defaults | changes)), result)


_FACTORY = {"family": "python", "factory": "mine:model", "vocab_size": 256}


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        pytest.param(
            [of_model(model={"vocab_size": 256}, reads="tokens")],
            {"batch_size", "sequence_length"},
            id="tokens",
        ),
        pytest.param([of_model(model={"family": "vit"})], {"batch_size"}, id="samples of its own"),
        pytest.param(
            [of_model(model=_FACTORY, reads="tokens")], {"batch_size", "sequence_length"}, id="theirs"
        ),
        pytest.param([of_model(model=_FACTORY, reads="samples")], {"batch_size"}, id="a batch function"),
        pytest.param([of_model(model=_FACTORY, reads="example")], set(), id="an example"),
        pytest.param(
            [failed("failed", experiment(model=_FACTORY)), of_model(model=_FACTORY, reads="example")],
            set(),
            id="what failed reads what others read",
        ),
        pytest.param(
            [failed("refused", experiment(model={"family": "vit"}, sequence_length=32))],
            {"sequence_length"},
            id="refused",
        ),
    ],
)
def test_only_what_a_model_reads_is_said(records: list[Record], expected: set[str]) -> None:
    assert as_read(records)[0].keys() & {"batch_size", "sequence_length"} == expected


def test_a_container_that_leaves_blocks_out_is_questioned() -> None:
    asked = "regions stand around 2 of 5 ResBlock; try ac.module_classes=[ResBlock]"
    trained = TrainedModel(
        elements={}, computes_in="float32", changed={}, inputs="tokens", remarks=("else", asked)
    )
    assert asked in plan_notes(replace(record(experiment("full")), trained=trained))
