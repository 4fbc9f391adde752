"""A step of 131,072 tokens is planned with the text that ships, which is shorter.

Planning needs no data, but it read the text and refused, because the text is too short for such a window.
"""

from __future__ import annotations

import json

from tests.gallery.outside._commands import acbench_plan

BEFORE = "refused"
RIGHT = "predicted"


def answer() -> str:
    """Return the status of the plan."""
    words = "-m", "model=mlp", "batch_size=1", "sequence_length=131072", "ac=full"
    (record,) = json.loads(acbench_plan(*words, "--json").stdout)
    return str(record["status"])
