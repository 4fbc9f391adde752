"""The table of predictions: its cells, its front, and the sentences below."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.experiment.experiment import Experiment
from harness.records import record as records
from harness.records.measured import TrainedModel
from harness.records.predicted_step import Outlook, SolvedField
from harness.report.content.plan_table import KERNELS, PlannedPoint, plan_sheet
from tests.harness import records_fixture
from tests.harness.composing import experiment_of
from tests.harness.predict.predicted import predicted

GIB = 1 << 30


def _experiment(ac: str) -> Experiment:
    return experiment_of(f"model=llama_nano data=synthetic mesh.dp_shard=2 ac={ac}")


def row(ac: str, peak_gib: int, step_s: float, **said: Any) -> PlannedPoint:
    experiment = _experiment(ac)
    return PlannedPoint(
        asked=experiment.to_dict(),
        record=predicted(experiment, peak_gib * GIB, step_s),
        outlook=Outlook(
            state="to run", hardware="h100", usable_bytes=40 * GIB, needed_bytes=peak_gib * GIB, **said
        ),
    )


def refused(ac: str) -> PlannedPoint:
    asked = _experiment(ac).to_dict()
    found = records.refused(records_fixture.identity(asked), "mesh: no", at=records_fixture.STARTED)
    return PlannedPoint(
        asked=asked, record=found, outlook=Outlook(state="refused", hardware="h100", usable_bytes=40 * GIB)
    )


def test_of_equally_fast_rows_that_with_the_fewest_bytes_is_named_then_the_plain_one() -> None:
    rows = [row("offload", 30, 0.5), row("full", 20, 0.5), row("none", 20, 0.5), row("nested", 10, 0.7)]
    assert plan_sheet(rows).notes[0].startswith("fastest that fits h100: none on shard2, ")
    assert plan_sheet(rows[:2]).notes[0].startswith("fastest that fits h100: full on shard2, ")


def test_what_a_step_waits_for_is_a_column() -> None:
    sheet = plan_sheet([row("none", 20, 0.5, bound_by="memory"), row("full", 10, 0.6)])
    assert [cells[sheet.columns.index("bound by")] for cells in sheet.rows] == ["memory", "-"]


def test_every_point_is_a_row() -> None:
    sheet = plan_sheet(
        [row("none", 50, 0.5), row("full", 20, 0.7), row("offload", 30, 0.8), refused("nested")]
    )
    assert sheet.columns == (
        *("variant", "mesh", "saved", "peak", "fits", "FLOPs", "step time", "tokens/s"),
        *("job's tokens/s", "state", "collectives"),
    )
    assert sheet.rows == (
        (
            "none",
            "shard2",
            "3.0 MiB",
            "50.0 GiB",
            "no",
            "4.00 G",
            "500 ms *",
            "2,000",
            "4,000",
            "to run",
            "25 (25.0 KiB)",
        ),
        (
            "full",
            "shard2",
            "3.0 MiB",
            "20.0 GiB",
            "yes",
            "4.00 G",
            "700 ms *",
            "1,429",
            "2,857",
            "to run",
            "25 (25.0 KiB)",
        ),
        (
            "offload",
            "shard2",
            "3.0 MiB",
            "30.0 GiB",
            "yes",
            "4.00 G",
            "800 ms",
            "1,250",
            "2,500",
            "to run",
            "25 (25.0 KiB)",
        ),
        ("nested", "shard2", "-", "-", "-", "-", "-", "-", "-", "refused", "-"),
    )
    assert sheet.notes == (
        "fastest that fits h100: full on shard2, 1,429 tokens/s of a device",
        "nested on shard2: refused, ConfigError: mesh: no",
    )


def test_one_device_is_the_whole_job() -> None:
    alone = experiment_of("model=llama_nano data=synthetic ac=full")
    asked = replace(row("full", 20, 0.5), asked=alone.to_dict(), record=predicted(alone, 20 * GIB))
    assert "job's tokens/s" not in plan_sheet([asked]).columns


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        pytest.param("samples", "8 samples/s of a device", id="samples"),
        pytest.param("example", "500 ms a step", id="a batch of the factory's"),
    ],
)
def test_a_model_without_tokens_is_as_fast_as_its_samples_of_a_device(inputs: str, said: str) -> None:
    asked = row("full", 20, 0.5)
    assert asked.record.time is not None
    time = replace(asked.record.time, tokens_per_s=None, job_tokens_per_s=None)
    trained = TrainedModel(elements={}, computes_in="float32", inputs=inputs)
    sheet = plan_sheet([replace(asked, record=replace(asked.record, time=time, trained=trained))])
    assert sheet.notes == (f"fastest that fits h100: full on shard2, {said}",)


def test_columns_without_anything_are_left_out() -> None:
    assert plan_sheet([refused("nested"), refused("full")]).columns == ("variant", "mesh", "state")


def test_a_solved_field_is_a_column_and_the_fastest_is_marked() -> None:
    rows = [
        row("none", 39, 0.5, solved=SolvedField(field="batch_size", value=1024)),
        row("full", 39, 0.4, solved=SolvedField(field="batch_size", value=2048, is_limit=True)),
        row("offload", 50, 0.4, solved=SolvedField(field="batch_size", value=None)),
    ]
    sheet = plan_sheet(rows)
    columns = dict(zip(sheet.columns, zip(*sheet.rows, strict=True), strict=True))
    assert columns["batch_size"] == ("1,024", "2,048", "none")
    assert columns["step time"] == ("500 ms", "400 ms *", "400 ms")
    assert sheet.notes[1:] == (
        "full on shard2: batch_size is at its own limit, not at that of the memory",
        "offload on shard2: no batch_size fits; the smallest step needs 50.0 GiB",
    )


def test_what_stands_in_for_the_users_choice_is_said_once() -> None:
    trained = TrainedModel(elements={}, computes_in="float32", replaced=("use_cache: True -> False",))
    rows = [row(ac, 20, 0.5) for ac in ("none", "full")]
    rows = [replace(each, record=replace(each.record, trained=trained)) for each in rows]
    said = "not as the model's own code has it: use_cache: True -> False"
    assert plan_sheet(rows).notes[1:] == (f"none on shard2 and 1 more: {said}",)
    assert rows[0].to_dict()["notes"] == [said]


def test_kernels_of_another_device_are_said_once() -> None:
    rows = [row(ac, 20, 0.5, is_stand_in=True) for ac in ("none", "full")]
    assert plan_sheet(rows).notes.count(KERNELS) == 1
    assert rows[0].to_dict()["notes"] == [KERNELS]


def test_a_row_that_was_solved_for_its_mesh_has_that_mesh() -> None:
    asked = row("full", 20, 0.5, solved=SolvedField(field="batch_size", value=8))
    on_four = experiment_of("model=llama_nano data=synthetic mesh.dp_shard=4 ac=full")
    solved = replace(
        asked,
        record=predicted(on_four, 10 * GIB),
        outlook=Outlook(state="to run", solved=SolvedField(field="mesh.dp_shard", value=4, is_limit=True)),
    )
    sheet = plan_sheet([solved, asked])
    assert [cells[sheet.columns.index("mesh")] for cells in sheet.rows] == ["shard4", "shard2"]
    assert solved.to_dict()["notes"] == ["mesh.dp_shard is at its own limit, not at that of the memory"]
