"""Routers of experts stand with their margins, and with the tokens that change experts, by rank."""

from __future__ import annotations

from harness.report.content.contents import document
from harness.report.content.routers import routers
from harness.report.facts.document import plain
from harness.report.facts.sweep_records import sweep_of
from tests.harness.records_fixture import experiment, rank_result, record


def test_each_router_stands_by_rank() -> None:
    result = rank_result()
    result["routing"] = [
        {"router": "layers.0.router", "tokens": 32, "margin": 0.25, "changed_tokens": 0},
        {"router": "layers.1.router", "tokens": 32, "margin": None, "changed_tokens": 2},
    ]
    sweep = sweep_of([record(experiment("full"), result)], name="sweep")
    table = routers(sweep)
    assert [[plain(cell) for cell in row] for row in table.rows] == [
        ["full on single", "layers.0.router", "0", "32", "0.25", "0"],
        ["full on single", "layers.1.router", "0", "32", "-", "2"],
    ]
    assert getattr(table.rows[1][5][0], "path", None) == "work/routing/1/changed_tokens"
    (more,) = (section for section in document(sweep).sections if section.key == "traffic")
    assert "routers" in [item.key for item in more.items]


def test_without_shared_experts_there_is_no_table() -> None:
    sweep = sweep_of([record(experiment("full"), rank_result())], name="sweep")
    assert routers(sweep).rows == ()
