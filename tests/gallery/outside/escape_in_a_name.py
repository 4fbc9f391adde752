"""A model's name has an escape character, and the report is made as markdown.

Pages and terminals got it as it was; the library that draws figures can end the process by signal 6.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.gallery.outside._commands import ENVIRONMENT, acbench

BEFORE = "exit 0, a report with the character"
RIGHT = "exit 0, a report without the character"


def answer() -> str:
    """Return the status of the report, and whether it holds the character."""
    name = "model.name='a\x1b[31mb'"
    acbench("-m", "model=mlp", name, "protocol=smoke", "ac=none,full", "tracker=none", "name=esc")
    words = [sys.executable, "-m", "harness.report", "outputs/esc", "--format", "markdown"]
    ended = subprocess.run(words, env=ENVIRONMENT, capture_output=True, check=False)
    page = Path("outputs/esc/report.md")
    if not page.exists():
        return f"exit {ended.returncode}, no report"
    has = "\x1b" in page.read_text() or b"\x1b" in ended.stdout
    return f"exit {ended.returncode}, a report {'with' if has else 'without'} the character"
