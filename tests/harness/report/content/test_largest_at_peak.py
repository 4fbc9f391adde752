"""What lives at the peak stands side by side, a row for each origin."""

from __future__ import annotations

from typing import Any

from harness.records.record import Record
from harness.report.content.contents import document
from harness.report.content.largest_at_peak import MOST_BESIDE, largest_at_peak
from harness.report.facts.document import Table, plain
from harness.report.facts.sweep_records import sweep_of
from tests.harness.records_fixture import experiment, rank_result, record

MIB = 1 << 20


def living(module: str, mib: int, part: str, count: int = 1) -> dict[str, Any]:
    return {
        "bytes": mib * MIB, "count": count, "part": part, "op": "aten.mm.default", "module": module,
        "source": "model.py:7", "shape": [8, 4], "dtype": "float32",
    }  # fmt: skip


def variant(ac: str, *tensors: dict[str, Any]) -> Record:
    result = rank_result()
    result["memory"]["largest_at_peak"] = list(tensors)
    return record(experiment(ac), result)


def cells(table: Table) -> list[list[str]]:
    return [[plain(cell) for cell in row] for row in table.rows]


def test_trials_stand_side_by_side_the_baseline_first() -> None:
    sweep = sweep_of(
        [
            variant("full", living("layers.3", 2, "temporary"), living("layers.0", 1, "saved")),
            variant("none", living("layers.0", 8, "saved", 2), living("layers.0", 4, "temporary")),
        ],
        name="sweep",
    )
    table = largest_at_peak(sweep)
    assert table.columns == ("made by", "in", "at", "shape", "none on single", "full on single")
    origin = ["aten.mm.default", "model.py:7", "8×4 float32"]  # noqa: RUF001 (times)
    assert cells(table) == [
        [origin[0], "layers.0", *origin[1:], "8.0 MiB saved (2 of them), 4.0 MiB temporary", "1.0 MiB saved"],
        [origin[0], "layers.3", *origin[1:], "-", "2.0 MiB temporary"],
    ]
    number = table.rows[0][4][0]
    assert getattr(number, "path", None) == "memory/largest_at_peak/0/bytes"
    assert "peak" in {section.key for section in document(sweep).sections}


def test_the_first_trials_are_shown_and_none_of_records_without() -> None:
    variants = ["none", "full", "offload", "nested", "selective_op", "budget"]
    sweep = sweep_of([variant(ac, living("layers.0", 1, "saved")) for ac in variants], name="sweep")
    assert len(largest_at_peak(sweep).columns) == 4 + MOST_BESIDE
    without = sweep_of([variant("full")], name="sweep")
    assert largest_at_peak(without).rows == ()
    assert "peak" not in {section.key for section in document(without).sections}
