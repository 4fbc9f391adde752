from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from harness.records.measured import MeasuredWork
from harness.records.record import Ending, Record, build, refused, validate
from harness.report.facts.flat_record import flat_summary
from tests.harness.records_fixture import (
    FINISHED,
    OK,
    STARTED,
    experiment,
    failed,
    identity,
    predicted_step,
    rank_result,
    record,
)

CONTRACT = {
    "": {
        "schema_version",
        "trial_id",
        "environment_id",
        "name",
        "started_at",
        "finished_at",
        "experiment",
        "status",
        "error",
        "verdict",
        "parity",
        "memory",
        "work",
        "time",
        "plan",
        "environment",
    },
    "parity": {"level", "steps", "outputs", "loss", "gradients", "buffers", "rng_state", "parameters"},
    "parity.loss": {"equal", "max_abs", "max_rel", "first_difference"},
    "memory": {
        "saved_bytes",
        "peak_bytes",
        "activation_peak_bytes",
        "peak_phase",
        "peak_module",
        "parameter_bytes",
        "gradient_bytes",
        "optimizer_bytes",
        "by_rank",
        "allocator",
        "predicted_peak_bytes",
        "baseline",
    },
    "memory.allocator": {
        "source",
        "peak_requested_bytes",
        "peak_allocated_bytes",
        "peak_reserved_bytes",
        "workspace_bytes",
    },
    "memory.baseline": {"saved_bytes", "peak_bytes"},
    "work": {
        "forward_flops",
        "backward_flops",
        "recomputed_flops",
        "recomputed_ops",
        "never_fired",
        "offloaded_bytes",
        "chunks",
        "calls",
        "collectives",
        "collective_bytes",
        "baseline",
    },
    "work.baseline": {"forward_flops", "backward_flops"},
    "time": {"step_time_s", "ratio_to_baseline", "tokens_per_s", "mfu", "hfu", "peak_flops_per_s_source"},
    "time.step_time_s": {"median", "p10", "p90", "count"},
    "time.ratio_to_baseline": {"median", "low", "high"},
}


def at(value: Any, path: str) -> Any:
    for key in filter(None, path.split(".")):
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value


def put(value: Any, path: str, new: Any) -> None:
    parent, _, key = path.rpartition(".")
    at(value, parent)[key] = new


def two_ranks(change: Callable[[dict[str, Any]], None]) -> Record:
    """The record of two ranks of which rank 1, reported first, is changed."""
    other = rank_result(1)
    change(other)
    return record(None, other, rank_result(0))


@pytest.mark.parametrize("path", CONTRACT, ids=lambda path: path or "record")
def test_names_of_the_contract(path: str) -> None:
    assert set(at(record().to_dict(), path)) >= CONTRACT[path]


def test_a_failure_has_the_names_of_the_contract() -> None:
    assert failed().to_dict()["error"] == {
        "kind": "ValueError",
        "message": "no\nmore",
        "rank": 1,
        "phase": "parity",
        "log": "rank1.log",
    }


@pytest.mark.parametrize(
    "written",
    [
        pytest.param(record, id="ok"),
        pytest.param(lambda: failed("oom"), id="out of memory"),
        pytest.param(lambda: refused(identity({"ac": "fulll"}), "ac: unknown", at=STARTED), id="refused"),
    ],
)
def test_json_and_back_is_the_same_record(written: Callable[[], Record]) -> None:
    assert validate(json.loads(json.dumps(written().to_dict(), allow_nan=False))) == written()


def test_numbers_that_json_lacks_survive() -> None:
    def spoil(result: dict[str, Any]) -> None:
        result["parity"]["losses"] = [5.5, "nan", "inf"]
        result["parity"]["loss"] |= {"equal": False, "max_abs": math.inf, "max_rel": math.nan}

    spoilt = two_ranks(spoil).to_dict()
    assert spoilt["parity"]["losses"] == [5.5, "nan", "inf"]
    assert (spoilt["parity"]["loss"]["max_abs"], spoilt["parity"]["loss"]["max_rel"]) == ("inf", "nan")
    assert validate(json.loads(json.dumps(spoilt, allow_nan=False))).to_dict() == spoilt


@pytest.mark.parametrize(
    ("path", "other", "merged_path", "expected"),
    [
        pytest.param("memory.saved_bytes", 5_000_000, "memory.saved_bytes", 5_000_000, id="bytes: maximum"),
        pytest.param("memory.saved_bytes", 1, "memory.saved_bytes", 3_145_728, id="bytes: never a sum"),
        pytest.param(
            "memory.peak_module", "head", "memory.peak_module", "layers.3", id="peak module: tie to rank 0"
        ),
        pytest.param(
            "memory.allocator", None, "memory.allocator.workspace_bytes", 4096, id="allocator: where known"
        ),
        pytest.param("work.forward_flops", 7, "work.forward_flops", 1_000_000_000, id="FLOPs: maximum"),
        pytest.param(
            "work.recomputed_ops",
            {"aten.mm.default": 17},
            "work.recomputed_ops",
            {"aten.mm.default": 17, "aten.gelu.default": 4},
            id="counts: maximum by name",
        ),
        pytest.param(
            "work.collectives",
            {"forward": {"broadcast": 1}},
            "work.collectives.forward",
            {"all_gather": 8, "broadcast": 1},
            id="collectives: maximum by phase and name",
        ),
        pytest.param("observation.offloaded_bytes", 12, "work.offloaded_bytes", 12, id="offloaded: maximum"),
        pytest.param(
            "baseline.memory.peak_bytes",
            30_000_000,
            "memory.baseline.peak_bytes",
            30_000_000,
            id="baseline: maximum",
        ),
        pytest.param("baseline", None, "memory.baseline", None, id="baseline: of all ranks or of none"),
        pytest.param("parity", None, "parity", None, id="parity: of all ranks or of none"),
        pytest.param("time", None, "time", None, id="time: of all ranks or of none"),
        pytest.param(
            "time.variant_s",
            [0.1, 0.9, 0.1, 0.1, 0.1, 0.1],
            "time.samples_s.variant",
            [0.5, 0.9, 0.5, 0.5, 0.5, 0.5],
            id="time: the slowest rank of each step",
        ),
        pytest.param(
            "time.peak_flops_per_s", 5e10, "time.peak_flops_per_s", 5e10, id="peak rate: the slowest device"
        ),
        pytest.param("time.energy_j", 4.0, "time.energy_j", None, id="energy: of all ranks or of none"),
        pytest.param(
            "parity.losses", [6.5, 6.25, 6.0], "parity.losses", [6.0, 5.75, 5.5], id="loss: mean over ranks"
        ),
    ],
)
def test_merging_over_ranks(path: str, other: Any, merged_path: str, expected: Any) -> None:
    merged = two_ranks(lambda result: put(result, path, other))
    assert at(merged.to_dict(), merged_path) == expected


def test_phase_and_module_of_the_peak_are_of_the_rank_with_the_highest() -> None:
    change = {"peak_bytes": 99_000_000, "peak_phase": "forward", "peak_module": "head", "saved_bytes": 1}
    merged = two_ranks(lambda result: result["memory"].update(change, saved_by_module={"head": 1})).memory
    assert merged is not None
    assert (merged.peak_bytes, merged.peak_phase, merged.peak_module) == (99_000_000, "forward", "head")
    assert merged.saved_by_module == {"layers.0": 2_097_152, "layers.1": 1_048_576}  # rank 0 saves more
    assert [(each.rank, each.peak_bytes) for each in merged.by_rank] == [(0, 10_485_760), (1, 99_000_000)]


def test_energy_is_a_sum() -> None:
    results = [rank_result(rank) for rank in (0, 1)]
    for result in results:
        result["time"]["energy_j"] = 4.0
    merged = record(None, *results).time
    assert merged is not None
    assert merged.energy_j == 8.0


def difference(rank: int, step: int) -> dict[str, Any]:
    return {
        "name": "w",
        "index": [3, 17],
        "rank": rank,
        "step": step,
        "expected": 0.125,
        "actual": 0.1252,
        "position": 0,
    }


def test_parity_needs_every_rank_and_names_the_earliest_step_of_the_lowest_rank() -> None:
    results = [rank_result(rank) for rank in range(3)]
    for rank, step in ((1, 2), (2, 1)):
        results[rank]["parity"]["gradients"] = {
            "equal": False,
            "max_abs": 0.1 * rank,
            "max_rel": 0.5 / rank,
            "first_difference": difference(rank, step),
        }
    merged = record(None, *results)
    assert merged.verdict == "differs"
    assert merged.to_dict()["parity"]["gradients"] == {
        "equal": False,
        "max_abs": 0.2,
        "max_rel": 0.5,
        "first_difference": difference(2, 1),
    }
    assert merged.to_dict()["parity"]["loss"]["equal"] is True


def test_the_first_difference_is_the_first_in_time_on_any_rank() -> None:
    results = [rank_result(rank) for rank in range(2)]
    found = {  # rank -> part, step, position, blocks with gradients that differ
        0: ("gradients", 1, 4, {"layers.0": True, "layers.1": False}),
        1: ("gradients", 1, 2, {"layers.0": False, "layers.1": True}),
    }
    for rank, (part, step, position, blocks) in found.items():
        seen = difference(rank, step) | {"position": position}
        unequal = {"equal": False, "max_abs": 1.0, "max_rel": 1.0}
        results[rank]["parity"][part] = unequal | {"first_difference": seen}
        results[rank]["parity"]["outputs"] = unequal | {"first_difference": difference(rank, 2)}
        results[rank]["parity"]["first"] = seen | {"part": part, "blocks": blocks}
    parity = record(None, *results).parity
    assert parity is not None
    assert parity.first is not None
    assert (parity.first.part, parity.first.step, parity.first.rank) == ("gradients", 1, 1)
    assert parity.first.blocks == {"layers.0": True, "layers.1": True}
    (sentence,) = parity.differences()
    assert sentence == (
        "parity: gradient of 'w' differs first at (3, 17) on rank 1 in step 1: 0.1250 vs 0.1252; "
        "gradients differ in every block; then outputs (step 2)"
    )


@pytest.mark.parametrize(
    ("stages", "key"),
    [pytest.param([], "ranks", id="unlike ranks"), pytest.param([0], "pipeline", id="stages")],
)
def test_of_unlike_plans_the_highest_is_the_trials(stages: list[int], key: str) -> None:
    plans = [
        {"budget_bytes": 100, "predicted_peak_bytes": peak, "extra_flops": flops, "stages": stages}
        for peak, flops in ((90, 1), (95, 2), (90, 1))
    ]
    results = [rank_result(rank) for rank in range(3)]
    for result, plan in zip(results, plans, strict=True):
        result["observation"]["plan"] = plan
    assert record(None, *results).plan == {**plans[1], key: plans[:2]}


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        pytest.param([{}, {}], None, id="gradients on all ranks"),
        pytest.param(
            [{"zero_from": 0}, {"zero_from": 1}],
            "all gradients are zero or absent on both sides from step 1 on",
            id="zero on all ranks",
        ),
        pytest.param([{"zero_from": 0}, {}], None, id="zero on one rank"),
        pytest.param(
            [{"zero_blocks_from": 2}, {"zero_blocks_from": 0}],
            "the gradients inside every checkpointed block are zero or absent on both sides from step 2 on, "
            "so nothing shows what was recomputed there",
            id="zero in the blocks",
        ),
        pytest.param(
            [{}, {"not_finite_from": 1, "not_finite": "w"}],
            "gradients are not finite on both sides from step 1 on, first that of 'w': equal NaN and "
            "infinities prove nothing",
            id="NaN on one rank",
        ),
    ],
)
def test_gradients_without_weight_prove_nothing(ranks: list[dict[str, Any]], reason: str | None) -> None:
    results = [rank_result(rank) for rank in range(len(ranks))]
    for result, weightless in zip(results, ranks, strict=True):
        result["parity"]["weightless"] = weightless
    found = record(None, *results)
    assert (found.verdict, found.reason) == ("neutral" if reason is None else "unverified", reason)


DRIFTING = {"equal": False, "max_abs": 1.0, "max_rel": 1.0, "first_difference": difference(0, 0)}


@pytest.mark.parametrize(
    ("differing", "drifting", "verdict"),
    [
        pytest.param(["gradients"], [], "differs", id="the plain model repeats itself"),
        pytest.param(["gradients"], ["outputs"], "unverified", id="it does not"),
        pytest.param(["state"], ["state"], "neutral", id="state that no run repeats"),
        pytest.param(["gradients", "state"], ["state"], "differs", id="gradients beside such state"),
        pytest.param(["state"], ["buffers", "state"], "unverified", id="state, where more is not repeated"),
    ],
)
def test_a_variant_is_blamed_where_the_plain_model_repeats_itself(
    differing: list[str], drifting: list[str], verdict: str
) -> None:
    result = rank_result()
    control = rank_result()["parity"] | dict.fromkeys(drifting, DRIFTING)
    result["parity"] |= dict.fromkeys(differing, DRIFTING) | {"control": control}
    found = record(None, result)
    assert found.verdict == verdict
    if verdict == "unverified":
        assert found.reason is not None
        assert found.reason.startswith("the plain model does not repeat itself: ")
        assert " 'w' differs first at (3, 17) on rank 0 in step 0: 0.1250 vs 0.1252" in found.reason


def test_links_of_the_chain_are_merged_over_ranks_one_by_one() -> None:
    results = [rank_result(rank) for rank in range(2)]
    for rank in range(2):
        equal = rank_result()["parity"]
        unequal = equal["gradients"] | {"equal": rank == 0, "max_abs": float(rank)}
        results[rank]["parity"]["chain"] = [equal, equal | {"gradients": unequal}]
    parity = record(None, *results).parity
    assert parity is not None
    assert [link.gradients.max_abs for link in (parity, *parity.chain)] == [0.0, 0.0, 1.0]
    assert [link.is_equal for link in (*parity.chain, parity)] == [True, False, False]


def test_never_fired_means_on_no_rank() -> None:
    results = [rank_result(rank) for rank in (0, 1)]
    for result, never in zip(results, (["mm", "comm"], ["comm"]), strict=True):
        result["observation"] |= {"named": ["mm", "comm"], "never_fired": never}
    merged = record(None, *results).work
    assert merged is not None
    assert merged.never_fired == ("comm",)


def test_speed_by_hand() -> None:
    results = rank_result(0), rank_result(1)
    for result in results:
        result["time"]["devices"] = 2
    time = record(None, *results).time
    assert time is not None
    assert (time.step_time_s.median, time.step_time_s.count) == (0.5, 6)
    assert time.ratio_to_baseline is not None
    assert time.ratio_to_baseline.median == 1.25
    assert time.tokens_per_s == 1024 / 2 / 0.5
    assert time.job_tokens_per_s == 1024 / 0.5
    assert time.mfu == 3e9 / 0.5 / 1e11
    assert time.hfu == 4e9 / 0.5 / 1e11


@pytest.mark.parametrize(
    ("change", "unknown"),
    [
        pytest.param({"peak_flops_per_s": None}, {"mfu", "hfu"}, id="no peak rate"),
        pytest.param({"tokens_per_step": None}, {"tokens_per_s", "job_tokens_per_s"}, id="no tokens"),
        pytest.param({"twin_s": []}, {"ratio_to_baseline"}, id="no twin"),
    ],
)
def test_what_is_not_known_is_null(change: dict[str, Any], unknown: set[str]) -> None:
    result = rank_result()
    result["time"] |= change
    time = record(None, result).to_dict()["time"]
    assert {name for name, value in time.items() if value is None} - {
        "energy_j",
        "peak_flops_per_s",
    } == unknown


@pytest.mark.parametrize(
    ("twin", "expected"),
    [
        pytest.param({}, {"aten.mm.default": 6}, id="a twin that recomputes nothing"),
        pytest.param({"aten.mm.default": 4}, {"aten.mm.default": 2}, id="a part of it"),
        pytest.param({"aten.mm.default": 6, "aten.gelu.default": 1}, {}, id="all of it, and more"),
    ],
)
def test_what_the_twin_recomputes_is_not_the_variants(twin: dict[str, int], expected: dict[str, int]) -> None:
    works = [
        MeasuredWork(
            forward_flops=900,
            backward_flops=2700,
            recomputed_flops=100 * sum(counts.values()),
            recomputed_ops=counts,
        )
        for counts in ({"aten.mm.default": 6}, twin)
    ]
    found = works[0].beyond(works[1])
    assert (found.recomputed_ops, found.recomputed_flops) == (expected, 100 * sum(expected.values()))
    assert (found.forward_flops, found.backward_flops) == (900, 2700)


def test_the_plain_trial_is_its_own_baseline() -> None:
    result = rank_result() | {"baseline": None}
    plain = record(experiment("none"), result)
    assert plain.memory is not None
    assert plain.memory.baseline is not None
    assert plain.memory.baseline.saved_bytes == plain.memory.saved_bytes
    assert plain.work is not None
    assert plain.work.recomputed_flops == 0
    assert plain.time is not None
    assert plain.time.mfu == 3e9 / 0.5 / 1e11
    assert plain.time.hfu == 4e9 / 0.5 / 1e11


@pytest.mark.parametrize(
    ("missing", "verdict"),
    [
        pytest.param({"time": None}, "neutral", id="in timing"),
        pytest.param({"time": None, "parity": None}, "unverified", id="in parity"),
        pytest.param({"time": None, "parity": None, "baseline": None}, "unverified", id="before the twin"),
    ],
)
def test_a_trial_whose_time_was_over_keeps_what_was_measured(missing: dict[str, Any], verdict: str) -> None:
    error = {"kind": "timeout", "message": "no result within 30 s", "phase": "timing"}
    ending = Ending(status="timeout", error=error, started_at=STARTED, finished_at=FINISHED)
    late = build(identity(), ending, [rank_result() | missing])
    assert late.memory is not None
    assert late.work is not None
    assert (late.status, late.verdict, late.time) == ("timeout", verdict, None)
    assert (late.parity is None) == ("parity" in missing)
    assert validate(late.to_dict()) == late


@pytest.mark.parametrize("status", ["oom", "failed", "lost"])
def test_a_trial_that_did_not_end_well_has_no_measurements(status: str) -> None:
    ending = Ending(
        status=status, error={"kind": "SIGKILL", "message": ""}, started_at=STARTED, finished_at=FINISHED
    )
    ended = build(identity(), ending, [rank_result()], environment={"torch": "2.13.0"})
    assert (ended.memory, ended.work, ended.parity, ended.time) == (None, None, None, None)
    assert (ended.verdict, ended.environment) == ("unverified", {"torch": "2.13.0"})


def test_refused() -> None:
    message = "mesh.tp: must be at least 1, got 0"
    point = refused(identity({"ac": "full", "seed": "x"}), message, at=STARTED)
    assert (point.status, point.verdict) == ("refused", "unverified")
    assert point.error is not None
    assert (point.error.kind, point.error.message, point.error.rank) == ("ConfigError", message, None)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        pytest.param("schema_version", 2, "record.schema_version: must be 1, got 2", id="another version"),
        pytest.param(
            "memory.saved_bytes",
            1.5,
            "record.memory.saved_bytes: must be an integer, got 1.5",
            id="bytes that are no integer",
        ),
        pytest.param(
            "memory.saved_bytes",
            True,
            "record.memory.saved_bytes: must be an integer, got True",
            id="bytes that are a boolean",
        ),
        pytest.param(
            "memory.by_rank", {}, "record.memory.by_rank: must be a list, got {}", id="ranks without order"
        ),
        pytest.param(
            "memory.largest_saved.0",
            {},
            "record.memory.largest_saved[0].bytes: is missing",
            id="a missing key inside a list",
        ),
        pytest.param(
            "work.calls", [1], "record.work.calls: must be an object, got [1]", id="counts without names"
        ),
        pytest.param(
            "work.recomputed_ops",
            {"mm": "1"},
            "record.work.recomputed_ops.mm: must be an integer, got '1'",
            id="a count in words",
        ),
        pytest.param(
            "time.mfu", "high", "record.time.mfu: must be a number, got 'high'", id="a rate in words"
        ),
        pytest.param("parity", 3, "record.parity: must be an object, got 3", id="parity that is a number"),
        pytest.param(
            "parity.loss.equal",
            1,
            "record.parity.loss.equal: must be true or false, got 1",
            id="equality that is a number",
        ),
        pytest.param(
            "status",
            "fine",
            "record.status: must be one of ok, oom, failed, timeout, refused, lost, predicted, got 'fine'",
            id="unknown status",
        ),
        pytest.param(
            "verdict",
            "good",
            "record.verdict: must be one of neutral, differs, inert, unverified, got 'good'",
            id="unknown verdict",
        ),
        pytest.param(
            "status",
            "oom",
            "record.error: must be null exactly when the status is ok or predicted, which is 'oom'",
            id="a failure without an error",
        ),
    ],
)
def test_what_is_no_record_is_refused_with_its_path(path: str, value: Any, message: str) -> None:
    foreign = record().to_dict()
    if path.endswith(".0"):
        at(foreign, path.rpartition(".")[0])[0] = value
    else:
        put(foreign, path, value)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        validate(foreign)


def test_a_missing_key_is_named() -> None:
    torn = record().to_dict()
    del torn["memory"]["peak_bytes"]
    with pytest.raises(ValueError, match=r"^record\.memory\.peak_bytes: is missing$"):
        validate(torn)


def test_a_list_is_no_record() -> None:
    with pytest.raises(ValueError, match=r"^record: must be an object, got \[\]$"):
        validate([])


def test_a_rank_result_of_another_form_names_rank_and_path() -> None:
    with pytest.raises(ValueError, match=r"^rank 1\.memory\.saved_bytes: must be an integer, got None$"):
        two_ranks(lambda result: put(result, "memory.saved_bytes", None))


def test_fields_of_a_later_version_do_not_hinder_reading() -> None:
    assert validate(record().to_dict() | {"colour": "blue"}) == record()


def test_records_and_reports_need_no_torch() -> None:
    program = (
        "import sys, harness.records.record, harness.records.store, "
        "harness.report.content.terminal_table, harness.launchers.progress, "
        "harness.report.wandb.publisher; print({'torch', 'wandb', 'hydra', 'omegaconf'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"


def test_the_summary_is_flat() -> None:
    assert all(
        isinstance(value, int | float | str | bool)
        for value in flat_summary(record(None, rank_result())).values()
    )
    assert OK.status == flat_summary(record())["status"]


@pytest.mark.parametrize(("difference", "is_told"), [(0, False), (8, True)], ids=["as predicted", "not so"])
def test_a_peak_that_was_not_predicted_is_told(*, difference: int, is_told: bool) -> None:
    measured = rank_result()["memory"]
    step = predicted_step(measured, peak_bytes=difference, saved_bytes=difference)
    found = build(identity(), OK, [rank_result()], predicted=step)
    peak, saved = measured["peak_bytes"], measured["saved_bytes"]
    said = (
        f"predicted a peak of {peak + difference:,} bytes and measured {peak:,}; "
        f"predicted that forward saves {saved + difference:,} bytes and measured {saved:,}"
    )
    assert found.note == (said if is_told else None)
    assert found.memory is not None
    assert (found.predicted, found.memory.predicted_peak_bytes) == (step, peak + difference)


@pytest.mark.parametrize(("difference", "is_told"), [(0, False), (8, True)], ids=["as estimated", "not so"])
def test_an_estimate_is_told_with_its_error(*, difference: int, is_told: bool) -> None:
    measured = rank_result()["memory"]
    step = replace(predicted_step(measured, peak_bytes=difference), assumes=("it rains",))
    peak = measured["peak_bytes"]
    error = f"{difference / peak:+.2%}"
    said = f"estimated a peak of {peak + difference:,} bytes and measured {peak:,} ({error}); "
    found = build(identity(), OK, [rank_result()], predicted=step)
    assert found.note == f"{said * is_told}predicted assuming that it rains"


def test_a_row_says_which_operators_are_not_counted() -> None:
    shares = {"aten._linalg_svd.default": 0.25, "mine::scan": 0.125}
    uncounted = {name: {"count": 2, "seconds_share": share} for name, share in shares.items()}
    ranks = [rank_result(rank) for rank in (0, 1)]
    ranks[1]["work"]["uncounted_ops"] = uncounted
    found = record(experiment("full"), *ranks)
    assert found.note == (
        "FLOPs of aten._linalg_svd, mine::scan are not counted: "
        "at least 37.5% of the step's seconds, by their bytes"
    )
    assert found.to_dict()["work"]["uncounted_ops"] == uncounted
