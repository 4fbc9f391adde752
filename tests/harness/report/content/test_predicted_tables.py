"""What was predicted beside what was measured, and what a plan says of its points."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from harness.records.predicted_step import Outlook, PredictedStep, SolvedField
from harness.records.record import Record, build
from harness.report.content.columns import result_cells
from harness.report.content.contents import document
from harness.report.content.predicted_tables import beside_measured, fastest, outlooks
from harness.report.facts.document import Table, plain
from harness.report.facts.sweep_records import load, named, sweep_of
from tests.harness.records_fixture import OK, experiment, identity, predicted_step, rank_result, record

GIB = 1 << 30
EXACT = predicted_step(rank_result()["memory"])
SENT = rank_result()["work"]["collectives"]


def measured(ac: str, predicted: PredictedStep) -> Record:
    return build(identity(experiment(ac)), OK, [rank_result()], predicted=predicted)


def words(table: Table) -> list[dict[str, str]]:
    return [dict(zip(table.columns, map(plain, row), strict=True)) for row in table.rows]


def test_trials_stand_with_what_was_predicted_the_worst_first() -> None:
    found = [
        record(experiment("none")),  # nobody has predicted it
        measured("full", replace(EXACT, collectives=SENT, hardware="this_cpu", step_time_s=0.6)),
        measured("offload", replace(EXACT, peak_bytes=2 * EXACT.peak_bytes, collectives=SENT)),
        measured("nested", replace(EXACT, forward_flops=EXACT.forward_flops + 1, collectives=SENT)),
    ]
    rows = words(beside_measured(sweep_of(found, name="demo")))
    assert [(row["trial"].split()[0], row["largest error"]) for row in rows] == [
        ("offload", "100.000%"),
        ("nested", "below 0.001%"),
        ("full", "none"),
    ]
    assert [row["peak"] for row in rows] == ["20.0 MiB / 10.0 MiB ≠", *["10.0 MiB / 10.0 MiB"] * 2]
    assert [row["step time"] for row in rows] == ["-", "-", "600 ms / 500 ms (+20%)"]


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        pytest.param(SENT, "all 25, with their bytes", id="all"),
        pytest.param({}, "≠ ", id="none of them"),
    ],
)
def test_collectives_are_compared_by_name(sent: dict[str, dict[str, int]], said: str) -> None:
    step = replace(EXACT, collectives=sent, collective_bytes=EXACT.collective_bytes)
    (row,) = words(beside_measured(sweep_of([measured("full", step)], name="demo")))
    assert row["collectives"].startswith(said)


@pytest.mark.parametrize(
    ("off_by", "assumes", "cell"),
    [
        pytest.param(0, (), "10.0 MiB", id="as predicted"),
        pytest.param(8, (), "10.0 MiB ≠", id="other bytes"),
        pytest.param(8, ("it rains",), "10.0 MiB ≈", id="an estimate"),
    ],
)
def test_a_row_says_that_other_bytes_were_predicted(off_by: int, assumes: tuple[str, ...], cell: str) -> None:
    step = replace(EXACT, saved_bytes=EXACT.saved_bytes + off_by, assumes=assumes)
    (entry,) = named([measured("full", step)])
    assert plain(result_cells(entry)["predicted peak"]) == cell


def planned(ac: str, hardware: str, needed_gib: int, step_s: float, state: str = "to run") -> Record:
    made = record(experiment(ac, batch_size=8))
    assert made.time is not None
    assert made.time.ratio_to_baseline is not None
    ratio = replace(made.time.ratio_to_baseline, median=step_s, low=step_s, high=step_s)
    time = replace(made.time, ratio_to_baseline=ratio)
    time = replace(time, step_time_s=replace(time.step_time_s, median=step_s))
    assert made.memory is not None
    memory = replace(made.memory, peak_bytes=needed_gib * GIB)
    outlook = Outlook(
        state=state,
        hardware=hardware,
        usable_bytes=40 * GIB,
        needed_bytes=needed_gib * GIB,
        is_stand_in=True,
        solved=SolvedField(field="batch_size", value=8) if state == "done" else None,
    )
    return replace(
        made,
        status="predicted",
        verdict="unverified",
        parity=None,
        time=time,
        memory=memory,
        outlook=outlook,
    )


PLAN = [
    planned("none", "h100", 50, 1.0),
    planned("full", "h100", 20, 1.3, "done"),
    planned("offload", "h100", 30, 1.2),
    planned("nested", "h100", 30, 1.5),
]


def test_a_plan_says_what_fits_what_is_best_and_what_is_done() -> None:
    sweep = sweep_of(PLAN, name="plan")
    found = {row["point"].split()[0]: row for row in words(outlooks(sweep))}
    assert {name: (row["fits"], row["front"]) for name, row in found.items()} == {
        "none": ("no", "*"),
        "full": ("yes", "*"),
        "offload": ("yes", "*"),
        "nested": ("yes", "-"),
    }
    assert (found["full"]["state"], found["full"]["largest batch_size"]) == ("done", "8")
    assert [plain(each.line) for each in fastest(sweep)] == [
        "Fastest that fits h100: offload on single, 1.2 s a step."
    ]


def test_a_file_of_a_plan_is_a_report_without_verdicts(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    both = [*PLAN, planned("none", "a100", 50, 1.0), planned("full", "a100", 20, 1.3)]
    file.write_text(json.dumps([each.to_dict() for each in both]), encoding="utf-8")
    sweep = load(file)
    content = document(sweep)
    said = " ".join(plain(each.line) for each in content.statements)
    keys = {item.key for item in content.items}
    assert len({entry.trial_id for entry in sweep.entries}) == len(both)
    assert {"outlooks", "front"} <= keys
    assert "verdicts" not in keys
    assert "predicted for h100" in said
    assert "unverified" not in said
    assert plain(content.subtitle).startswith("plan for h100, plan for a100")
