"""Commands of acbench as a stranger types them, in the empty folder that a case runs in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]


def acbench(*words: str) -> subprocess.CompletedProcess[str]:
    """Run `acbench` with `words`."""
    return _run("-m", "harness", *words)


def acbench_plan(*words: str) -> subprocess.CompletedProcess[str]:
    """Run `acbench-plan` with `words`."""
    return _run("-c", "from harness.command_line.cli import plan; plan()", *words)


def records(name: str) -> list[dict[str, Any]]:
    """Return the records of the sweep `name` in this folder, by path."""
    return [json.loads(path.read_text()) for path in sorted(Path("outputs", name).glob("*/record.json"))]


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        env=os.environ | {"PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
