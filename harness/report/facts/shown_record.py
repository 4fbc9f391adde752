"""Records as people may see them: escapes stand for invisible characters and for those that move text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from harness.records.fields import decode
from harness.records.record import Failure, Record, validate
from harness.report.facts.number_words import escaped, printable, shortened

_MOST_CHARACTERS = 300
"""Length of a name beyond which only its beginning is shown: people read no more of it."""

_ODD = re.compile(rf"\\[abfnrtvxuU0-9]|[^'\"]{{{_MOST_CHARACTERS}}}")
"""What the `repr` of a record has where it holds an escape, or perhaps a long text."""


def shown(record: Record) -> Record:
    r"""Return `record` with NUL, ESC, U+2028, directions of writing and their like as `\x00`.

    Names are one line, and no longer than people read; what an error says keeps its lines.
    """
    if not _ODD.search(repr(record)):  # hardly any has one, and this is much faster than to look
        return record
    found = validate(_escaped(record.to_dict()))
    if record.error is None:
        return found
    words = {name: printable(word) for name, word in asdict(record.error).items() if isinstance(word, str)}
    return replace(found, error=decode(Failure, {**asdict(record.error), **words}, "error"))


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return escaped(shortened(value, _MOST_CHARACTERS))
    if isinstance(value, Mapping):
        return {_escaped(key): _escaped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(item) for item in value]
    return value
