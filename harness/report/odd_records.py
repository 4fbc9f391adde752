"""Records that no report can show: valid as far as a record is, with values that make no sense."""

from __future__ import annotations

import io
from pathlib import Path

from harness.records.record import Record
from harness.report.content.contents import document
from harness.report.content.terminal_table import print_table
from harness.report.facts.document import Figure
from harness.report.facts.sweep_records import records_below, sweep_of
from harness.report.formats.csv import to_csv
from harness.report.formats.html import to_html
from harness.report.formats.markdown import to_markdown, to_svg


def odd_records(root: Path) -> dict[str, str]:
    """Return why a record cannot be shown, by trial_id, of those that cannot; each is tried by itself.

    Args:
        root: folder or file of a sweep.
    """
    problems = {record.trial_id: _problem(record) for record in records_below(root)}
    return {trial: problem for trial, problem in problems.items() if problem is not None}


def _problem(record: Record) -> str | None:
    """Return what goes wrong with a report on this record alone."""
    try:
        _show(record)
    except Exception as error:  # noqa: BLE001 (whatever a value that makes no sense leads to)
        return f"cannot be shown, {type(error).__name__}: {error}"
    return None


def _show(record: Record) -> None:
    """Write a record in every format, to nobody."""
    content = document(sweep_of([record], name="one"))
    to_html(content, records=1)
    to_markdown(content, "figures")
    for section in content.sections:
        for item in section.items:
            if isinstance(item, Figure):
                to_svg(item)
    to_csv([record])
    print_table([record], stream=io.StringIO())
