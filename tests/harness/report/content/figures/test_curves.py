"""Memory through a step: a panel a mesh, phases of equal length at the same place for every trial."""

from __future__ import annotations

from harness.report.content.figures.curves import timeline_figure
from harness.report.facts.sweep_records import sweep_of
from tests.harness.records_fixture import experiment, rank_result, record


def test_phases_are_marked_and_meshes_apart() -> None:
    result = rank_result()
    moment = result["memory"]["timeline"][0]
    phases = ("forward", "forward", "backward", "optimizer", "optimizer")
    result["memory"]["timeline"] = [moment | {"phase": phase} for phase in phases]
    records = [
        record(experiment(), result),
        record(experiment("none")),
        record(experiment("full", "shard2"), result),
    ]
    figure = timeline_figure(sweep_of(records, name="demo"))
    assert figure is not None
    assert figure.spec["facet"]["sort"] == ["single", "shard2"]
    found: dict[tuple[str, str], list[float]] = {(row["place"], row["variant"]): [] for row in figure.rows}
    for row in figure.rows:
        found[row["place"], row["variant"]].append(row["at"])
    assert found == {
        ("single", "none"): [0.5, 1.5],
        ("single", "full"): [0.25, 0.75, 1.5, 2.25, 2.75],
        ("shard2", "full"): [0.25, 0.75, 1.5, 2.25, 2.75],
    }
    rules = [layer for layer in figure.spec["spec"]["layer"] if layer["mark"]["type"] == "rule"]
    assert [rule["encoding"]["x"]["datum"] for rule in rules] == [1, 2]
