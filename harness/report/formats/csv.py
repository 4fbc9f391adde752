"""All numbers of a sweep as one CSV file: a row a trial, values as exact as in the records."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from typing import Any

from harness.records.record import Record
from harness.report.facts.commands import command
from harness.report.facts.flat_record import flat_config, flat_summary

_FORMULA = re.compile(r"[\t\r]|\s*[=+\-@\uff1d\uff0b\uff0d\uff20]")
"""How text begins that a spreadsheet runs: some skip white space, some take full-width signs for signs."""


def to_csv(records: Sequence[Record]) -> str:
    """Return the rows; a column that a trial has nothing in is empty, lists and objects are JSON.

    Lines end as in RFC 4180, so that a line break of either kind within a cell is quoted. Text that a
    spreadsheet would run as a formula stands behind an apostrophe. Source: OWASP, CSV injection.
    """
    rows = [
        flat_config(record) | flat_summary(record) | {"command": command(record.experiment)}
        for record in records
    ]
    columns = dict.fromkeys(column for row in rows for column in row)
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(map(_cell, columns)), lineterminator="\r\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({_cell(column): _cell(value) for column, value in row.items()})
    return text.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, dict | list | tuple | bool):
        return json.dumps(value)
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value
