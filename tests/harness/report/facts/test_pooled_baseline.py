"""Speeds rank trials as their ratios do, whatever the machine did while each ran."""

from __future__ import annotations

from typing import Any

import pytest

from harness.records.record import Record
from harness.report.facts import quantities
from harness.report.facts.pooled_baseline import pooled_step_times
from harness.report.facts.sweep_records import named
from tests.harness.records_fixture import experiment, failed, rank_result, record

_MEGATRON = {"name": "megatron"}


def timed(ac: str, twin_s: list[float], ratio: float, /, mesh: str = "single", **changes: Any) -> Record:
    result = rank_result()
    result["time"] |= {"twin_s": twin_s, "variant_s": [each * ratio for each in twin_s]}
    result["time"]["peak_flops_per_s_source"] = "NVIDIA H200 datasheet"
    return record(experiment(ac, mesh, **changes), result)


def test_a_machine_that_slows_down_changes_no_rank() -> None:
    records = [timed("full", [1.0] * 6, 1.5), timed("nested", [8.0] * 6, 1.25), timed("none", [2.0] * 7, 1.0)]
    measured = [quantities.TOKENS_PER_S.of(record) or 0.0 for record in records]
    assert measured[0] > measured[1]
    entries = named(records)
    assert [entry.twin_step_s for entry in entries] == [2.0] * 3
    for quantity in (quantities.TOKENS_PER_S, quantities.MFU):
        full, nested, none = (entry.speed(quantity) for entry in entries)
        assert full is not None
        assert nested is not None
        assert none is not None
        assert full.value * 1.5 == pytest.approx(none.value)
        assert nested.value * 1.25 == pytest.approx(none.value)
    tokens = entries[2].speed(quantities.TOKENS_PER_S)
    assert tokens is not None
    assert (tokens.value, tokens.path) == (512.0, "pooled time/tokens_per_s")


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        pytest.param([timed("nested", [3.0] * 12, 1.0)], 3.0, id="of the same setting"),
        pytest.param([timed("nested", [3.0] * 12, 1.0, "shard2")], 1.0, id="not of another mesh"),
        pytest.param([timed("nested", [3.0] * 12, 1.0, seed=1)], 1.0, id="not of another recipe"),
        pytest.param([timed("none", [3.0] * 12, 1.0, shard=_MEGATRON)], 3.0, id="a sharding's own twin"),
        pytest.param([timed("full", [3.0] * 12, 1.0, shard=_MEGATRON)], 1.0, id="not what is sharded"),
        pytest.param([failed("oom", experiment("nested"))], 1.0, id="nothing was timed"),
    ],
)
def test_twins_of_the_same_model_are_pooled(others: list[Record], expected: float) -> None:
    records = [timed("full", [1.0] * 6, 1.5), *others]
    assert named(records)[0].twin_step_s == expected


def test_without_a_ratio_the_measured_speed_stands() -> None:
    result = rank_result()
    result["time"]["twin_s"] = []
    alone = record(experiment("full"), result)
    assert pooled_step_times([alone], [""]) == [None]
    (entry,) = named([alone])
    shown = entry.speed(quantities.TOKENS_PER_S)
    assert shown is not None
    assert (shown.value, shown.path) == (2048.0, "time/tokens_per_s")
