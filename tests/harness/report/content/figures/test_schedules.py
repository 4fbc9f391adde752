"""Memory by rank: a panel a schedule and rank, a line a trial, and tiles that say what the rank does."""

from __future__ import annotations

from typing import Any

import pytest

from harness.records.record import Record
from harness.report.content.figures.encodings import KIND_COLOURS
from harness.report.content.figures.schedules import schedule_figure
from harness.report.content.tables import stages
from harness.report.facts.document import plain
from harness.report.facts.sweep_records import sweep_of
from tests.harness.records_fixture import experiment, rank_result, record

_ACTIONS = (
    {"1F0": 500, "1I0": 700, "1W0": 600},
    {"0F0": 900, "2F0": 800, "2I0": 900, "0I0": 100, "2W0": 1, "0W0": 2},
)


def _record(variant: str, *, actions: bool = True, **options: Any) -> Record:
    results = []
    for rank, done in enumerate(_ACTIONS):
        result = rank_result(rank)
        result["pipeline"] = {
            "stages": [1] if rank == 0 else [0, 2],
            "in_flight": 3,
            "in_flight_weights": 4,
            "bytes_a_microbatch": 1024,
            "forwards": {"layers.0": {"forward": 2, "input": 2, "weight": 18}},
        }
        if actions:
            result["pipeline"]["actions"] = [{"action": a, "bytes": n} for a, n in done.items()]
        results.append(result)
    resolved = experiment(variant) | {"microbatches": 2}
    resolved["ac"] |= options
    return record(resolved, *results)


def test_every_rank_has_a_panel_with_the_bytes_of_its_actions() -> None:
    figure = schedule_figure(sweep_of([_record("none"), _record("full")], name="demo"))
    assert figure is not None
    panels = figure.spec["facet"]["sort"]
    assert panels == ["single, rank 0", "single, rank 1"]
    found = [[row for row in figure.rows if row["panel"] == panel] for panel in panels]
    assert [[row["bytes"] for row in rows] for rows in found] == [
        2 * list(done.values()) for done in _ACTIONS
    ]
    first = found[1][: len(_ACTIONS[1])]
    assert [row["word"] for row in first] == ["F0", "F0", "I0", "I0", "W0", "W0"]
    assert [row["tile"] for row in first] == [0, 1, 1, 0, 1, 0]
    assert [row["is_peak"] for row in first] == [True, False, True, False, False, False]
    assert [row["is_tile"] for row in found[1]] == [True] * 6 + [False] * 6
    assert figure.paths == {"bytes": "memory/pipeline/{rank}/actions/{number}/bytes"}


def test_tiles_have_colours_of_their_own() -> None:
    figure = schedule_figure(sweep_of([_record("full")], name="demo"))
    assert figure is not None
    layers = figure.spec["spec"]["layer"]
    (fill, *_) = [layer["encoding"]["fill"]["scale"] for layer in layers if "fill" in layer["encoding"]]
    assert fill["domain"] == ["forward", "input part", "weight part"]
    assert not set(fill["range"]) & set(KIND_COLOURS.values())
    assert "strokeDash" not in layers[0]["encoding"]


def test_variants_of_one_colour_are_told_apart() -> None:
    records = [_record("full"), _record("full", split_backward="torch"), _record("none")]
    figure = schedule_figure(sweep_of(records, name="demo"))
    assert figure is not None
    dash = figure.spec["spec"]["layer"][0]["encoding"]["strokeDash"]
    dashes = dict(zip(dash["scale"]["domain"], dash["scale"]["range"], strict=True))
    shown = dash["legend"]["values"]
    assert ["split_backward=torch" in choice for choice in shown].count(True) == 1
    assert dashes[shown[0]] != dashes[shown[1]]
    assert dashes["none"] in (dashes[shown[0]], dashes[shown[1]])


@pytest.mark.parametrize("records", [[record(experiment())], [_record("full", actions=False)]])
def test_nothing_is_drawn_without_actions(records: list[Record]) -> None:
    assert schedule_figure(sweep_of(records, name="demo")) is None


def test_the_table_has_a_row_a_rank() -> None:
    table = stages(sweep_of([_record("full"), record(experiment("none"))], name="demo"))
    assert [tuple(map(plain, row[1:])) for row in table.rows] == [
        ("0", "1", "3", "4", "1.0 KiB", "10.0 MiB", "1 + 1 + 9 (layers.0)"),
        ("1", "0 2", "3", "4", "1.0 KiB", "10.0 MiB", "1 + 1 + 9 (layers.0)"),
    ]
