"""A report is made of a sweep of which one record holds something odd, in each of thirty ways.

Some ended the report in every format, so that the good record was not shown either.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.gallery.outside._commands import ENVIRONMENT, acbench

BEFORE = "no report of: name 6, name 7, name 8, name 10"
RIGHT = "every report is made"

_TEXTS = (
    "<script>alert(1)</script>", '=HYPERLINK("http://x","y")', "\n=1+1", "\uff1d1+1", "|a|b|\r\n# head",
    "\u202egnp.exe", "\x00nul", "\x1b[31mred", "a" * 200_000, "-1+1|cmd", "\u2028x", "__proto__", "\ufeff",
    "\x7f", "\x9b31m", "${jndi}",
)  # fmt: skip


def answer() -> str:
    """Return which records end a report, or that none does."""
    acbench("-m", "model=mlp", "protocol=smoke", "ac=none,full", "tracker=none", "name=s")
    path = min(Path("outputs/s").glob("*/record.json"))
    good = json.loads(path.read_text())
    bad = []
    for name, odd in _odd(good):
        path.write_text(odd)
        words = [sys.executable, "-m", "harness.report", "outputs/s", "--format", "html,markdown,csv"]
        if subprocess.run(words, env=ENVIRONMENT, capture_output=True, check=False).returncode:
            bad.append(name)
    return f"no report of: {', '.join(bad)}" if bad else "every report is made"


def _odd(good: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for number, text in enumerate(_TEXTS):
        odd = copy.deepcopy(good)
        odd["experiment"]["model"]["name"] = odd["environment"]["device"] = text
        yield f"name {number}", json.dumps(odd)
    numbers: tuple[float | str, ...] = (0, -1, 1e308, "nan")
    for each in numbers:
        yield f"numbers {each}", json.dumps(_each_number(good, each) | {"schema_version": 1})
    whole = json.dumps(good)
    yield "nested deep", whole[:-1] + ', "x": ' + "[" * 100_000 + "]" * 100_000 + "}"
    yield "a long integer", whole.replace('"peak_bytes": ', '"peak_bytes": ' + "9" * 1_000_000, 1)
    yield "no number", whole.replace('"peak_bytes": ', '"peak_bytes": NaN, "z": ', 1)
    for key in ("experiment", "environment", "memory", "time", "parity"):
        yield f"{key} is text", json.dumps(good | {key: "x"})


def _each_number(value: Any, other: float | str) -> Any:
    if isinstance(value, dict):
        return {key: _each_number(item, other) for key, item in value.items()}
    if isinstance(value, list):
        return [_each_number(item, other) for item in value]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return other if is_number else value
