from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest

from harness.records.record import Record, refused, validate
from harness.report.content.tables import collectives
from harness.report.content.terminal_table import print_table, sheet
from harness.report.facts.document import plain
from harness.report.facts.labels import labels
from harness.report.facts.number_words import NumberUnit, human_bytes, human_flops, in_words
from harness.report.facts.sweep_records import named
from tests.harness.records_fixture import STARTED, experiment, failed, identity, rank_result, record

COLUMNS = (
    "variant",
    "mesh",
    "status",
    "verdict",
    "saved",
    "peak",
    "step time vs baseline",
    "recomputed FLOPs",
    "tokens/s",
    "MFU / HFU",
    "collectives",
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def measured(part: str, **changes: Any) -> Record:
    result = rank_result()
    result[part] = result[part] | changes
    return record(None, result)


def cell(shown: Record, column: str) -> str:
    content = sheet(named([shown]))
    return content.rows[0][content.columns.index(column)]


@pytest.mark.parametrize(
    ("shown", "column", "expected"),
    [
        pytest.param(record(), "variant", "full", id="variant"),
        pytest.param(record(experiment(stage_ac=["full", "none"])), "variant", "full/none", id="one a stage"),
        pytest.param(
            record(experiment(chunk={"name": "minimum"})), "variant", "full + chunk minimum", id="and chunk"
        ),
        pytest.param(
            record(experiment(shard={"name": "megatron"})), "variant", "full + shard megatron", id="and shard"
        ),
        pytest.param(record(experiment("full", "shard2")), "mesh", "shard2", id="mesh"),
        pytest.param(record(), "status", "ok", id="status"),
        pytest.param(record(), "verdict", "neutral", id="verdict"),
        pytest.param(
            measured("parity", level="tolerance"),
            "verdict",
            "neutral (tolerance)",
            id="neutral within a tolerance says so",
        ),
        pytest.param(record(), "saved", "3.0 MiB", id="saved"),
        pytest.param(record(), "peak", "10.0 MiB", id="peak"),
        pytest.param(record(), "recomputed FLOPs", "1.00 G", id="recomputed"),
        pytest.param(record(), "step time vs baseline", "1.25× [1.25, 1.25]", id="ratio"),  # noqa: RUF001 (times)
        pytest.param(
            measured("time", twin_s=[0.4, 0.6, 0.5, 0.4, 0.6, 0.5]),
            "step time vs baseline",
            "1.00× [0.83, 1.25] ≈1",  # noqa: RUF001 (times)
            id="a ratio that cannot be told from 1",
        ),
        pytest.param(
            measured("time", variant_s=[3.996, 1.0, 1.0, 5.54, 5.54, 5.54], twin_s=[1.0] * 6),
            "step time vs baseline",
            "4.77× [1.00, 5.54] ≈1",  # noqa: RUF001 (times)
            id="a median far from 1 stands, whatever its interval",
        ),
        pytest.param(
            measured("memory", host_peak_bytes=1), "peak", "10.0 MiB GPU", id="what only a GPU would save"
        ),
        pytest.param(measured("time", twin_s=[]), "step time vs baseline", "-", id="no twin"),
        pytest.param(record(), "tokens/s", "2,048", id="tokens/s"),
        pytest.param(measured("time", tokens_per_step=None), "tokens/s", "-", id="no tokens"),
        pytest.param(
            measured("time", peak_flops_per_s_source="NVIDIA H200 datasheet, SXM, dense bfloat16"),
            "MFU / HFU",
            "6.0% / 8.0%",
            id="utilisation of a published peak",
        ),
        pytest.param(record(), "MFU / HFU", "-", id="a peak that the trial measured ranks nothing"),
        pytest.param(
            measured("time", peak_flops_per_s=None, peak_flops_per_s_source=None),
            "MFU / HFU",
            "- / -",
            id="no peak rate",
        ),
        pytest.param(record(), "collectives", "all_gather 8+8, reduce_scatter 0+9", id="forward+backward"),
        pytest.param(
            measured("work", collectives={"forward": {}, "backward": {}, "optimizer": {"all_reduce": 1}}),
            "collectives",
            "all_reduce 0+0+1",
            id="and optimizer",
        ),
        pytest.param(measured("work", collectives={}), "collectives", "-", id="no collectives"),
        pytest.param(failed("oom"), "saved", "-", id="nothing measured"),
    ],
)
def test_cells(shown: Record, column: str, expected: str) -> None:
    assert cell(shown, column) == expected


def test_collectives_that_recomputation_repeats_have_a_column() -> None:
    repeats = measured("work", collectives_repeated={"all_gather": 8})
    table, without = (collectives(named([each])) for each in (repeats, record()))
    assert table.columns == (*without.columns, "repeated")
    counts = {plain(row[1]): plain(row[-1]) for row in table.rows}
    assert counts == {"all_gather": "8", "reduce_scatter": "-"}


def test_columns_in_order() -> None:
    assert sheet(named([record()])).columns == COLUMNS


def test_a_model_column_where_models_differ() -> None:
    content = sheet(named([record(), record(experiment(model={"name": "llama_nano"}))]))
    assert content.columns == ("model", *COLUMNS)
    assert [row[:2] for row in content.rows] == [("gpt_nano", "full"), ("llama_nano", "full")]


def test_notes_name_the_model_where_models_differ() -> None:
    other = refused(identity(experiment(model={"name": "llama_nano"})), "no", at=STARTED)
    assert sheet(named([record(), other])).notes == ("full on single, llama_nano: refused, ConfigError: no",)


def test_a_predicted_column_where_a_peak_was_predicted() -> None:
    predicted = record().to_dict()
    predicted["memory"]["predicted_peak_bytes"] = 2048
    content = sheet(named([record(), validate(predicted)]))
    assert content.columns[8] == "predicted peak"
    assert [row[8] for row in content.rows] == ["-", "2.0 KiB ≠"]


@pytest.mark.parametrize(
    ("shown", "notes"),
    [
        pytest.param(record(), (), id="a neutral trial needs none"),
        pytest.param(
            failed("oom", kind="OutOfMemoryError", message="tried 3 GiB\nmore"),
            ("full on single: oom, OutOfMemoryError on rank 1 during parity: tried 3 GiB -> {path}",),
            id="a failure: kind, rank, phase, first line, path",
        ),
        pytest.param(
            refused(identity(), "mesh.tp: must be at least 1, got 0", at=STARTED),
            ("full on single: refused, ConfigError: mesh.tp: must be at least 1, got 0 -> {path}",),
            id="a refusal",
        ),
        pytest.param(
            failed("lost", message="", rank=None, phase=None),
            ("full on single: lost, ValueError:  -> {path}",),
            id="a failure without words",
        ),
        pytest.param(
            measured(
                "parity",
                gradients={
                    "equal": False,
                    "max_abs": 1.0,
                    "max_rel": 1.0,
                    "first_difference": {
                        "name": "norm.weight",
                        "index": [3, 17],
                        "rank": 0,
                        "step": 1,
                        "expected": 0.125,
                        "actual": 0.1252,
                    },
                },
            ),
            (
                (
                    "full on single: parity: gradient of 'norm.weight' differs first at (3, 17) on rank 0 "
                    "in step 1: 0.1250 vs 0.1252 -> {path}"
                ),
            ),
            id="a difference",
        ),
        pytest.param(
            measured("parity", absent=("outputs",)),
            (
                (
                    "full on single: outputs are not compared: the plan includes the loss, and they are "
                    "never whole"
                ),
            ),
            id="outputs that are never whole",
        ),
        pytest.param(
            measured("parity", uncompared=("a (lock)", "b (lock)", "c (lock)", "d (lock)", "e (lock)")),
            (
                (
                    "full on single: state that is not compared: a (lock), b (lock), c (lock), d (lock) and "
                    "1 more"
                ),
            ),
            id="locks that modules hold",
        ),
        pytest.param(
            measured("observation", named=["sdpa", "mm"], never_fired=["sdpa"]),
            ("full on single: never fired: sdpa",),
            id="an operator that never fired",
        ),
        pytest.param(
            measured("observation", named=["sdpa"], never_fired=["sdpa"]),
            (
                "full on single: never fired: sdpa",
                "full on single: inert: none of the operators it names ever fired",
            ),
            id="an inert trial",
        ),
        pytest.param(
            measured("work", policy_answers={"PREFER_RECOMPUTE": 40, "PREFER_SAVE": 2}),
            (),
            id="a policy that keeps results",
        ),
        pytest.param(
            measured("work", policy_answers={"PREFER_RECOMPUTE": 40, "'MUST_SAVE'": 2}),
            (
                (
                    "full on single: a policy answers 'MUST_SAVE' for 2 operators, and torch takes it as "
                    "PREFER_RECOMPUTE: return one of CheckpointPolicy's MUST_SAVE, PREFER_SAVE, "
                    "MUST_RECOMPUTE, PREFER_RECOMPUTE, or a bool"
                ),
                "full on single: a policy was asked about 42 operators and keeps none of their results",
            ),
            id="a policy that answers in words",
        ),
    ],
)
def test_notes(shown: Record, notes: tuple[str, ...]) -> None:
    path = Path("outputs/demo") / shown.trial_id / "record.json"
    assert sheet(named([shown]), Path("outputs/demo")).notes == tuple(
        note.format(path=path) for note in notes
    )


def test_processes_of_others_are_noted() -> None:
    shown = measured("environment", foreign_processes=[{"pid": 1, "name": "python", "bytes": 5}])
    assert sheet(named([shown])).notes == (
        "full on single: 1 foreign process(es) used the device while it ran",
    )


LABELS = [
    pytest.param([experiment("none"), experiment("full")], ["none", "full"], id="nothing but the variant"),
    pytest.param(
        [experiment("s", ac={"k": 1}), experiment("s", ac={"k": 2}), experiment("full", ac={"k": 3})],
        ["s k=1", "s k=2", "full"],
        id="an option that differs within a variant",
    ),
    pytest.param(
        [experiment(ac={"save_ops": ["mm", "sdpa"]}), experiment(ac={"save_ops": ["mm"]})],
        ["full save_ops=[mm,sdpa]", "full save_ops=[mm]"],
        id="a list",
    ),
    pytest.param(
        [experiment(dtype="fp32"), experiment(dtype="bf16")],
        ["full dtype=fp32", "full dtype=bf16"],
        id="a field of the experiment",
    ),
    pytest.param(
        [experiment(model={"dropout": 0.0}), experiment(model={"dropout": 0.5})],
        ["full model.dropout=0.0", "full model.dropout=0.5"],
        id="an option of the model",
    ),
    pytest.param(
        [experiment(model={"kwargs": {"width": 8}}), experiment(model={"kwargs": {"width": 16, "n": 1}})],
        ["full model.kwargs.width=8", "full model.kwargs.width=16 model.kwargs.n=1"],
        id="arguments of a factory",
    ),
    pytest.param(
        [experiment(data={"name": "text"}), experiment()],
        ["full data=text", "full data=synthetic"],
        id="another choice of data",
    ),
    pytest.param(
        [experiment(), experiment(model={"name": "m", "layers_fqn": "h"}, ac={"layers_fqn": "h"})],
        ["full", "full"],
        id="what the model hands on",
    ),
    pytest.param(
        [
            experiment(ac={"module_classes": []}),
            experiment(model={"name": "m"}, ac={"module_classes": ["ResBlock"]}),
        ],
        ["full", "full"],
        id="classes that are found for each model",
    ),
    pytest.param(
        [experiment(ac={"module_classes": []}), experiment(ac={"module_classes": ["ResBlock"]})],
        ["full module_classes=[]", "full module_classes=[ResBlock]"],
        id="classes that differ for one model",
    ),
    pytest.param([experiment(), {"ac": "fulll", "seed": 0}], ["full", "fulll"], id="a refused experiment"),
]


@pytest.mark.parametrize(("experiments", "expected"), LABELS)
def test_variants_are_called_by_what_differs(experiments: list[dict[str, Any]], expected: list[str]) -> None:
    content = sheet(named([record(each) for each in experiments]))
    assert [row[content.columns.index("variant")] for row in content.rows] == expected


def test_meshes_are_called_by_what_differs() -> None:
    swept = [experiment("full", "shard2", mesh={"reshard_after_forward": each}) for each in (True, False)]
    content = sheet(named([record(each) for each in [*swept, experiment()]]))
    assert [row[1] for row in content.rows] == [
        "shard2 reshard_after_forward=True",
        "shard2 reshard_after_forward=False",
        "single",
    ]


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (5 * 2**30, "5.0 GiB"),
        (2**50, "1024.0 TiB"),
    ],
)
def test_bytes_for_people(count: int, expected: str) -> None:
    assert human_bytes(count) == expected


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.00 k"),
        (10**6 - 1, "1.00 M"),
        (2 * 512**3, "268.44 M"),
        (10**19, "10000.00 P"),
    ],
)
def test_flops_for_people(count: int, expected: str) -> None:
    assert human_flops(count) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0000123, "0.0123 ms"),
        (0.1234, "123 ms"),
        (0.9996, "1 s"),
        (12.34, "12.3 s"),
        (99.96, "100 s"),
        (1234.5, "1,234 s"),
        (float("nan"), "nan ms"),
    ],
)
def test_seconds_for_people(value: float, expected: str) -> None:
    assert in_words(value, NumberUnit.SECONDS) == expected


def test_a_tree_of_labels_is_called_by_its_start_and_an_address() -> None:
    trees = [{f"layers.{number}": [number, 0] for number in range(count)} for count in (40, 41)]
    found = labels([experiment("nested", ac={"labels": tree}) for tree in trees])
    assert [label.variant for label in found] == [
        f"nested labels={str(trees[0])[:100]}…{address}" for address in ("58a6a9", "be5133")
    ]


def printed(*records: Record, stream: io.StringIO | None = None) -> list[str]:
    stream = stream or io.StringIO()
    print_table(list(records), stream=stream)
    return re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue()).splitlines()


def test_a_row_is_one_line_and_a_narrow_terminal_leaves_out_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    names = ("none", "full", "selective_layer", "selective_op")
    records = [record(experiment(name, mesh)) for name in names for mesh in ("single", "shard2")]
    lines = printed(*records, stream=Terminal())
    assert max(map(len, lines)) <= 80
    headings = [line.split()[:3] for line in lines if line.startswith("variant")]
    assert headings == [["variant", "mesh", "verdict"]]
    assert [line.rstrip() for line in lines if line.startswith("full ")] == [
        "full             single  neutral  3.0 MiB  10.0 MiB  1.25× [1.25, 1.25]",  # noqa: RUF001 (times)
        "full             shard2  neutral  3.0 MiB  10.0 MiB  1.25× [1.25, 1.25]",  # noqa: RUF001 (times)
    ]
    left_out = "left out, because the terminal is too narrow: recomputed FLOPs, tokens/s, collectives."
    assert left_out in " ".join(lines)


def test_columns_that_say_nothing_are_left_out() -> None:
    text = "\n".join(printed(record()))
    assert "status" not in text
    assert "MFU / HFU  " not in text
    assert "status" in "\n".join(printed(record(), failed("oom")))


def test_a_single_trial_has_a_row_for_its_twin_and_the_advice_comes_last() -> None:
    text = printed(record())
    twin = next(line.split() for line in text if line.startswith("(its twin)"))
    assert " ".join(twin[2:8]) == "single - 12.0 MiB 20.0 MiB"
    assert text[-1].endswith("50% less peak memory at 1.25× [1.25, 1.25] the step time.")  # noqa: RUF001
    assert not any(line.startswith("(its twin)") for line in printed(record(), record(experiment("nested"))))
    assert not any(line.startswith("(its twin)") for line in printed(record(experiment("none"))))


@pytest.mark.parametrize(
    ("shown", "explained"),
    [
        pytest.param(
            record(),
            ["saved, peak:", "step time vs baseline:", "FLOPs:", "tokens/s", "collectives:"],
            id="all",
        ),
        pytest.param(
            measured("time", twin_s=[], tokens_per_step=None),
            ["saved, peak:", "FLOPs:", "collectives:"],
            id="no times",
        ),
        pytest.param(failed("oom"), [], id="nothing measured"),
    ],
)
def test_the_columns_that_are_there_are_explained(shown: Record, explained: list[str]) -> None:
    sentences = ("saved, peak:", "step time vs baseline:", "FLOPs:", "tokens/s", "collectives:")
    below = [line for line in printed(shown) if line.startswith(sentences)]
    assert [next(each for each in sentences if line.startswith(each)) for line in below] == explained


def test_what_differs_is_said_below() -> None:
    assert "Trials differ in ac: full, none." in printed(record(), record(experiment("none")))


def test_elsewhere_than_on_a_terminal_a_row_with_a_long_name_is_one_plain_line() -> None:
    long = experiment(ac={"save_ops": ["aten._scaled_dot_product_flash_attention_for_cpu.default"] * 3})
    records = [record(), record(long)]
    lines = printed(*records)
    assert "…" not in "".join(lines)
    hidden = {"status", "predicted peak", "MFU / HFU"}
    content = sheet(named(records))
    for row in content.rows:
        (line,) = [line for line in lines if line.startswith(row[0] + "  ")]
        shown = [cell for name, cell in zip(content.columns, row, strict=True) if name not in hidden]
        assert all(cell in line for cell in shown)


@pytest.mark.parametrize("columns", [60, 140])
def test_on_a_terminal_cells_wrap_between_words_and_are_never_cut(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    lines = printed(record(), failed("oom"), stream=Terminal())
    words = {word for line in lines for word in line.split()}
    row = sheet(named([record()])).rows[0][: 6 if columns < 80 else None]
    assert words >= {word for cell in row for word in cell.split()} - {"-"}
    assert max(map(len, lines[:5])) <= max(columns, 80)


def test_brackets_are_text_and_no_markup() -> None:
    stream = io.StringIO()
    swept = [experiment(ac={"save_ops": [name]}) for name in ("bold", "red")]
    print_table([record(each) for each in swept], stream=stream)
    assert "save_ops=[bold]" in stream.getvalue()


def test_a_default_that_a_record_leaves_out_is_said_where_another_has_something_else() -> None:
    swept = [{}, {"microbatches": 4}]
    assert [each.variant for each in labels([experiment("full") | each for each in swept])] == [
        "full microbatches=1",
        "full microbatches=4",
    ]
    mesh = {"name": "shard2", "dp_shard": 2}
    meshes = [mesh, mesh | {"sync": "last"}]
    assert [each.mesh for each in labels([experiment("full") | {"mesh": each} for each in meshes])] == [
        "shard2 sync=each",
        "shard2 sync=last",
    ]
