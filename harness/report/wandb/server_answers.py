"""The latest answer of a W&B server, as wandb's own log of a synchronisation tells."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.report.facts.number_words import printable

_LOGS = "**/debug-sync*.log"
_MOST_CHARS = 200
_CREDENTIALS = re.compile(r"\b(Basic|Bearer)\s+\S+", re.IGNORECASE)


def last_answer(folder: Path, since_s: float) -> str:
    """Return one clause about the last answer that was none of use, without credentials.

    Args:
        folder: the tracker's folder, below which wandb leaves its logs.
        since_s: when the synchronisation began, in seconds of `time.time`; earlier logs say nothing of it.
    """
    answers = [_in_words(line) for path in _recent(folder, since_s) for line in _lines(path)]
    return next((answer for answer in reversed(answers) if answer is not None), "the server gave no answer")


def _recent(folder: Path, since_s: float) -> list[Path]:
    found = {path: path.stat().st_mtime for path in folder.glob(_LOGS) if path.is_file()}
    return sorted((path for path, written_s in found.items() if written_s >= since_s), key=found.__getitem__)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a log, a line each; torn lines are left out."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):  # torn
            continue
        if isinstance(value, dict):
            yield value


def _in_words(line: dict[str, Any]) -> str | None:
    """Return what a line says of an answer, `None` where it says something else."""
    if "status" in line:
        return f"the server's last answer: HTTP {line['status']} {_shown(line.get('body', ''))}".rstrip()
    if "error" in line:
        return f"the last request failed: {_shown(line['error'])}"
    return None


def _shown(text: object) -> str:
    shown = _CREDENTIALS.sub(r"\1 ...", " ".join(printable(str(text)).split()))
    key = os.environ.get("WANDB_API_KEY")
    return (shown.replace(key, "...") if key else shown)[:_MOST_CHARS]
