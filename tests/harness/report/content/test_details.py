from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.report.content.details import details
from harness.report.facts.document import Line, plain
from harness.report.facts.sweep_records import sweep_of
from tests.harness.records_fixture import record


def rows(plan: dict[str, Any]) -> dict[str, Line]:
    (entry,) = sweep_of([replace(record(), plan=plan)], name="demo").entries
    return {plain(what): value for what, value in details(entry).rows}


@pytest.mark.parametrize(
    ("plan", "lines"),
    [
        pytest.param(
            {"budget_bytes": 5, "mode": "exact", "left": None}, ["budget_bytes 5, mode exact"], id="flat"
        ),
        pytest.param(
            {"regions": [{"region": "0", "regions": [{"region": "0_0", "regions": []}]}, {"region": "1"}]},
            ["regions:", "  region 0", "    regions:", "      region 0_0", "  region 1"],
            id="nested regions",
        ),
        pytest.param(
            {"is_exact": True, "sizes": [1, 2], "by": {"layers.0": "save"}},
            ["is_exact true, sizes [1, 2]", "  by:", "    layers.0 save"],
            id="lists and objects",
        ),
        pytest.param(
            {"ops": [{"op": number} for number in range(50)]},
            ["ops:", *(f"  op {number}" for number in range(39)), "… 11 more lines"],
            id="long",
        ),
    ],
)
def test_a_plan_is_an_outline(plan: dict[str, Any], lines: list[str]) -> None:
    assert plain(rows(plan)["plan"]).splitlines() == lines
