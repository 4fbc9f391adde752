"""Every number that a report shows is read back and equals the store."""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from harness.records.record import STATUSES
from harness.records.store import Store
from harness.records.verdict import VERDICTS
from harness.report.content.contents import document
from harness.report.facts.document import Document, Figure
from harness.report.facts.sweep_records import SweepRecords, load
from harness.report.formats.csv import to_csv
from harness.report.formats.html import to_html
from harness.report.formats.markdown import to_markdown
from tests.harness.report.reading import Shown, agrees, at, counted, leaves, numbers_of, pooled
from tests.harness.report.synthetic import sweep

COUNT = 200
COLUMNS = {
    "saved": "memory/saved_bytes",
    "peak": "memory/peak_bytes",
    "predicted peak": "memory/predicted_peak_bytes",
    "recomputed FLOPs": "work/recomputed_flops",
}
_TOKENS = "pooled time/tokens_per_s"
_SUMMARISED = ("error", "memory", "work", "time", "parity")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = Store(tmp_path_factory.mktemp("synthetic"))
    for record in sweep(COUNT):
        store.write(record)
    return store.root


@pytest.fixture(scope="module")
def stored(root: Path) -> dict[str, dict[str, Any]]:
    """Return the records as JSON, read without the store."""
    found = [json.loads(path.read_text("utf-8")) for path in root.glob("*/record.json")]
    return {record["trial_id"]: record for record in found}


@pytest.fixture(scope="module")
def loaded(root: Path) -> SweepRecords:
    return load(root)


@pytest.fixture(scope="module")
def content(loaded: SweepRecords) -> Document:
    return document(loaded)


@pytest.fixture(scope="module")
def page(content: Document) -> str:
    return to_html(content, records=COUNT)


def is_true(shown: Shown, stored: dict[str, dict[str, Any]]) -> bool:
    if shown.path.startswith("count "):
        value: float = counted(list(stored.values()), shown.path)
    elif shown.path.startswith("pooled "):
        value = pooled(list(stored.values()), shown.owner, shown.path)
        return math.isclose(float(shown.value), value) and agrees(shown.text, value)
    else:
        value = at(stored[shown.owner], shown.path)
    return float(shown.value) == value and agrees(shown.text, value)


def test_the_sweep_has_every_status_and_verdict(stored: dict[str, dict[str, Any]]) -> None:
    assert len(stored) == COUNT
    assert {record["status"] for record in stored.values()} == set(STATUSES)
    assert {record["verdict"] for record in stored.values()} == set(VERDICTS)


def test_numbers_of_the_page(page: str, stored: dict[str, dict[str, Any]]) -> None:
    found = numbers_of(page)
    assert [shown for shown in found if not is_true(shown, stored)] == []
    shown = {(each.owner, each.path) for each in found}
    numbered = {
        (trial_id, path)
        for trial_id, record in stored.items()
        for path in COLUMNS.values()
        if record[path.partition("/")[0]] is not None and at(record, path) is not None
    }
    numbered |= {(trial_id, _TOKENS) for trial_id, record in stored.items() if record["time"] is not None}
    assert numbered <= shown
    assert len(found) > 20 * COUNT


def test_figures_of_the_page(page: str, content: Document, stored: dict[str, dict[str, Any]]) -> None:
    figures = {item.key: item for item in content.items if isinstance(item, Figure)}
    scripts = re.findall(r'<script type="application/json" data-figure="([\w-]+)">(.*?)</script>', page)
    kinds = ("front", "memory", "timeline", "work", "prediction")
    assert {key for key, _ in scripts} == set(figures)
    assert len(content.chapters) > 1
    assert set(kinds) <= set(figures)
    assert any(key.startswith("chunk-budget-mib") for key in figures)
    for number in range(2, len(content.chapters) + 1):
        assert {f"{kind}-{number}" for kind in kinds} <= set(figures)
    for key, text in scripts:
        rows = json.loads(text)["data"]["values"]
        assert rows
        assert [
            (row["trial_id"], column)
            for row in rows
            for column, path in figures[key].paths.items()
            if column in row and row[column] != at(stored[row["trial_id"]], path.format(**row))
        ] == []


def test_numbers_of_the_markdown(
    loaded: SweepRecords, content: Document, stored: dict[str, dict[str, Any]]
) -> None:
    text = to_markdown(content, "figures")
    blocks = [block for block in text.split("### All trials")[1].split("\n\n")[1:] if block.startswith("|")]
    tables = [
        [re.split(r"(?<!\\)\|", line.strip("|")) for line in block.splitlines()]
        for block in blocks[: next(i for i, block in enumerate(blocks) if i and "variant" in block[:12])]
    ]
    rows = [[cell for cells in parts for cell in cells] for parts in zip(*tables, strict=True)]
    heading, _, *rows = rows
    assert len(rows) == COUNT
    columns = {name.strip(): index for index, name in enumerate(heading)}
    wrong = []
    for entry, row in zip(loaded.entries, rows, strict=True):
        record = stored[entry.trial_id]
        for name, path in COLUMNS.items():
            cell = row[columns[name]].strip().removesuffix(" ≠")
            part = record[path.partition("/")[0]]
            value = None if part is None else at(record, path)
            if not (cell == "-" if value is None else agrees(cell, value)):
                wrong.append((entry.name, name, cell, value))
        ends = (row[columns["status"]].strip(), row[columns["verdict"]].strip().split(" ")[0])
        assert ends == (record["status"], record["verdict"])
    assert wrong == []


def test_numbers_of_the_csv(loaded: SweepRecords, stored: dict[str, dict[str, Any]]) -> None:
    rows = list(csv.DictReader(to_csv(loaded.records).splitlines()))
    assert len(rows) == COUNT
    wrong, seen = [], Counter[str]()
    for row in rows:
        record = stored[row["trial_id"]]
        for part in _SUMMARISED:
            folded = {
                key: value
                for key, value in (record[part] or {}).items()
                if key not in {"saved_by_module", "calls"}
            }
            for name, value in leaves({part: folded}):
                seen[part] += 1
                if float(row[name]) != value:
                    wrong.append((row["trial_id"], name))
        assert (row["status"], row["verdict"], row["seed"]) == (
            record["status"],
            record["verdict"],
            str(record["experiment"]["seed"]),
        )
    assert wrong == []
    assert all(seen[part] for part in _SUMMARISED)
