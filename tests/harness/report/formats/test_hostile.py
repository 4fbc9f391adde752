"""What names and messages, which anybody may have written, can do to a report: nothing."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from harness.records.store import Store
from harness.report.content.contents import document
from harness.report.facts.document import (
    CodeText,
    Document,
    Mark,
    Number,
    Section,
    Statement,
    Table,
    TrialName,
)
from harness.report.facts.number_words import NumberUnit, printable
from harness.report.facts.sweep_records import sweep_of
from harness.report.formats.csv import to_csv
from harness.report.formats.html import to_html
from harness.report.formats.markdown import in_markdown, to_markdown
from harness.report.main import main
from tests.harness.records_fixture import experiment, failed, rank_result, record

EVIL = """x"'><img src=x onerror=alert(1)></script></style><script>alert(1)</script>&lt;"""


def evil_document() -> Document:
    number = Number(value=1, unit=NumberUnit.COUNT, path=EVIL, trial_id=EVIL)
    parts = (
        EVIL,
        number,
        CodeText(text=EVIL),
        TrialName(name=EVIL, trial_id=EVIL),
        Mark(text=EVIL, about=EVIL),
    )
    shown: dict[str, Any] = {"title": EVIL, "columns": (EVIL, EVIL), "rows": ((parts, parts),), "about": EVIL}
    tables = (Table(key=f"trial-{EVIL}", **shown, is_folded=True), Table(key="open", **shown))
    return Document(
        title=EVIL,
        subtitle=(EVIL,),
        partial="",
        answer=(Statement(line=parts, trial_ids=(EVIL,)),),
        sections=(
            Section(key="one", title="One", statements=(Statement(line=parts, trial_ids=()),), items=tables),
        ),
    )


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_a_page_has_no_tag_that_is_not_ours() -> None:
    tags = _Tags()
    tags.feed(to_html(evil_document(), records=1))
    assert "img" not in tags.names
    assert {name for name in tags.attributes if name.startswith("on")} == set()
    assert to_html(evil_document(), records=1).count("<script") == 2  # at its head and at its end


def test_a_summary_in_markdown_has_no_tag_that_is_not_ours() -> None:
    text = to_markdown(evil_document(), "figures")
    assert re.findall(r"(?<![\\`])<(?!/?details>|/?summary>)\w+", re.sub("`[^`]*`", "", text)) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("a | b", r"a \| b", id="a column"),
        pytest.param("<b>", r"\<b>", id="a tag"),
        pytest.param("&lt;b&gt;", r"\&lt;b\&gt;", id="an entity"),
        pytest.param("[a](http://b)", r"[a\](http://b)", id="a link"),
        pytest.param("![a](http://b)", r"![a\](http://b)", id="a picture"),
        pytest.param("[a]: http://b", r"[a\]: http://b", id="a reference"),
        pytest.param("1.25 [1.20, 1.30])", "1.25 [1.20, 1.30])", id="an interval"),
        pytest.param("# a", r"\# a", id="a heading"),
        pytest.param("> a", r"\> a", id="a quotation"),
        pytest.param("~~a~~ $b$", r"\~\~a\~\~ \$b\$", id="struck out, and a formula"),
        pytest.param("layers_fqn _a_", r"layers_fqn \_a\_", id="underscores"),
        pytest.param("a\nb", "a b", id="a line break"),
    ],
)
def test_markdown_shows_what_was_written(text: str, expected: str) -> None:
    assert in_markdown((text,)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("a", "`a`", id="plain"),
        pytest.param("a`b", "`` a`b ``", id="a tick"),
        pytest.param("``a```", "```` ``a``` ````", id="many ticks"),
        pytest.param("a|b", r"`a\|b`", id="a column"),
    ],
)
def test_markdown_shows_code_as_it_is(text: str, expected: str) -> None:
    assert in_markdown((CodeText(text=text),)) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("=1+1", "+1", "-1", "@SUM(1)", "\t=1", "\r=1", "\n=1+1", " =1", "\u2028=1"),
        *("\uff1d1+1", "\uff0b1", "\uff0d1", "\uff20SUM(1)"),
    ],
)
def test_a_spreadsheet_runs_no_message(text: str) -> None:
    (row,) = csv.DictReader(io.StringIO(to_csv([failed(message=text, kind="-Error")]), newline=""))
    assert (row["error_message"], row["error_kind"]) == (f"'{text}", "'-Error")


def test_a_spreadsheet_keeps_negative_numbers() -> None:
    resolved = experiment(seed=-5)
    (row,) = csv.DictReader(to_csv([record(resolved)]).splitlines())
    assert row["seed"] == "-5"


def strictly(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


def test_numbers_that_json_does_not_have_are_in_no_figure() -> None:
    result = rank_result()
    result["parity"]["losses"] = [float("nan"), float("inf"), -float("inf")]
    result["time"]["energy_j"] = float("inf")
    budget = {"name": "budget", "budget_mib": float("inf")}
    records = [record(experiment(), result), record(experiment("none"))]
    records[0].experiment["chunk"] = budget
    page = to_html(document(sweep_of(records, name="demo")), records=2)
    figures: list[Mapping[str, Any]] = [
        strictly(text) for text in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page)
    ]
    assert len(figures) == 4
    assert '<data value="nan" data-p="parity/losses/0"' in page


def test_a_message_of_a_megabyte_is_shortened() -> None:
    records = [failed(message="x" * 1_000_000)]
    page = to_html(document(sweep_of(records, name="demo")), records=1)
    assert len(page) < 40_000
    assert f"{'x' * 400}… (999,600 more characters)" in page
    assert f"{'x' * 2_000}… (998,000 more characters)" in page


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("\x1b[31mred\x1b[0m", "red", id="colours"),
        pytest.param("a\x1b]0;title\x07", r"a\x1b]0;title\x07", id="a window's title"),
        pytest.param("a\u202eb\x00", r"a\u202eb\x00", id="other directions, and nothing"),
        pytest.param("ünï 語 😀\nb", "ünï 語 😀\nb", id="what people write"),
    ],
)
def test_a_terminal_is_told_nothing(text: str, expected: str) -> None:
    assert printable(text) == expected


def test_half_characters_are_words_in_every_format(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write(failed(message="no file a\udc80b 😀"))
    for path in ("x", "a\udc80"):
        store.write(record(experiment(data={"path": path})))
    assert main([str(tmp_path), "--format", "html,markdown,csv"]) == 0
    assert store.read(failed().trial_id).error == failed(message=r"no file a\udc80b 😀").error
    assert r"no file a\udc80b 😀" in (tmp_path / "report.html").read_text("utf-8")


def test_half_characters_of_others_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store(tmp_path)
    store.write(record(experiment("none")))
    path = store.write(failed(message="whole"))
    path.write_text(path.read_text("utf-8").replace("whole", r"\uD83D\uDE00"))
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().err == f"wrote {tmp_path / 'report.html'}\n"
    path.write_text(path.read_text("utf-8").replace(r"\uDE00", ""))
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().err.startswith(f"acbench-report: {path}: 'utf-8' codec can't encode character")
