"""What people read of a record holds no character that steers a terminal, a page or a line."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from harness.records.record import Record, validate
from harness.report.content.contents import document
from harness.report.facts.document import Figure
from harness.report.facts.labels import point_label, point_labels
from harness.report.facts.number_words import escaped, printable
from harness.report.facts.shown_record import shown
from harness.report.facts.sweep_records import sweep_of
from harness.report.formats.csv import to_csv
from harness.report.formats.html import to_html
from harness.report.formats.markdown import to_markdown, to_svg
from tests.harness.records_fixture import failed, record

CHARACTERS = {
    "NUL": "\0",
    "backspace": "\b",
    "line feed": "\n",
    "carriage return": "\r",
    "ESC": "\x1b",
    "a unit separator": "\x1f",
    "DEL": "\x7f",
    "a C1 control": "\x9b",
    "a line separator": "\u2028",
    "a paragraph separator": "\u2029",
    "next line": "\x85",
    "from right to left": "\u202e",
    "an isolated direction": "\u2066",
    "no width": "\u200b",
    "a byte order mark": "\ufeff",
    "no character": "\uffff",
}


def _named(name: str) -> Record:
    values: dict[str, Any] = copy.deepcopy(record().to_dict())
    values["experiment"]["model"]["name"] = name
    values["environment"]["device"] = name
    return validate(values)


@pytest.mark.parametrize("character", CHARACTERS.values(), ids=CHARACTERS)
def test_no_format_shows_a_character_that_nobody_sees(character: str) -> None:
    escape = character.encode("unicode_escape").decode()
    odd = _named(f"before{character}after")
    content = document(sweep_of([odd], name=f"a{character}b"))
    figures = [item for section in content.sections for item in section.items if isinstance(item, Figure)]
    texts = {
        "html": to_html(content, records=1),
        "markdown": to_markdown(content, "figures"),
        "csv": to_csv(sweep_of([odd], name="").records),
        **{f"figure {figure.key}": to_svg(figure) for figure in figures},
        "progress": point_label(odd.experiment),
        "all progress": "".join(point_labels([odd.experiment])),
    }
    assert [name for name, text in texts.items() if f"before{character}after" in text] == []
    for name in ("html", "csv", "progress", "all progress"):
        assert f"before{escape}after" in texts[name].replace("\\\\", "\\"), name


def test_a_usual_record_is_itself() -> None:
    assert shown(record()) == record()


def test_what_an_error_says_keeps_its_lines() -> None:
    error = failed("failed").error
    assert error is not None
    said = replace(error, message="one\r\ntwo \x1b[31mred\x1b[0m\0")
    found = shown(replace(failed("failed"), error=said)).error
    assert found is not None
    assert found.message == "one\ntwo red\\x00"


@pytest.mark.parametrize(
    ("text", "as_name", "as_text"),
    [
        ("plain ünïcode 日本", "plain ünïcode 日本", "plain ünïcode 日本"),
        ("a\x1b[31mb", "a\\x1b[31mb", "ab"),
        ("a\nb\tc", "a\\nb\tc", "a\nb\tc"),
        ("10 %\r50 %", "10 %\\r50 %", "10 %\n50 %"),
        ("a\u00a0b", "a\u00a0b", "a\u00a0b"),
    ],
)
def test_names_are_one_line_and_texts_keep_theirs(text: str, as_name: str, as_text: str) -> None:
    assert (escaped(text), printable(text)) == (as_name, as_text)


def test_a_name_that_nobody_reads_to_its_end_is_shortened() -> None:
    found = shown(_named("a" * 200_000))
    assert found.experiment["model"]["name"] == f"{'a' * 300}… (199,700 more characters)"


def test_a_figure_is_drawn_of_a_long_name_in_characters_beyond_16_bits() -> None:
    content = document(sweep_of([_named("\U0001f600" * 3000)], name="one"))
    for section in content.sections:
        for item in section.items:
            if isinstance(item, Figure):
                assert to_svg(item).startswith("<svg")
