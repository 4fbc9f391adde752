"""A trial that another one beats at its own peak is named, and its distance from the bound is a column."""

from __future__ import annotations

from typing import Any

from harness.records.record import Record
from harness.report.content.distances import cheaper
from harness.report.content.terminal_table import sheet
from harness.report.facts.document import plain
from harness.report.facts.sweep_records import named
from tests.harness.records_fixture import experiment, rank_result, record

MIB = 1 << 20
STEP = 3_000_000_000


def variant(ac: str, *, peak_mib: int, again: int, host_mib: int = 0) -> Record:
    result: dict[str, Any] = rank_result()
    result["memory"] |= {"peak_bytes": peak_mib * MIB, "host_peak_bytes": host_mib * MIB}
    result["work"] |= {"recomputed_flops": again}
    result["bound"] = {
        "peak_bytes": peak_mib * MIB,
        "host_peak_bytes": host_mib * MIB,
        "recomputed_flops": again,
        "step_flops": STEP,
        "lower_bound_extra_flops": 0,
        "lower_bound_autograd_flops": None,
    }
    return record(experiment(ac), result)


def test_the_cheapest_at_no_higher_peak_is_named() -> None:
    trials = named(
        [
            variant("full", peak_mib=10, again=900_000_000),
            variant("nested", peak_mib=10, again=600_000_000),
            variant("budget", peak_mib=9, again=300_000_000),
            variant("offload", peak_mib=5, again=0, host_mib=8),
        ]
    )
    said = [f"{entry.name}{plain(parts)}" for entry, _, parts in cheaper(trials)]
    beaten = "budget on single has no higher peak and recomputes 300.00 M in place of"
    assert said == [f"full on single: {beaten} 900.00 M", f"nested on single: {beaten} 600.00 M"]
    shown = sheet(trials)
    column = [row[shown.columns.index("above bound")] for row in shown.rows]
    assert column == ["30.00", "20.00", "10.00", "0.00"]
    assert set(said) <= set(shown.notes)


def test_a_trial_without_a_bound_has_no_column() -> None:
    assert "above bound" not in sheet(named([record()])).columns
