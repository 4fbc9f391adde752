"""Which files and functions a command enters, in all of its processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_WATCHING = Path(__file__).parent / "entering"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entered:
    """What was entered.

    Fields:
        files: whose functions were.
        functions: methods and nested functions are some; lambdas and comprehensions are not.
        rooms: functions by folder, two names deep, the most first.
    """

    files: int
    functions: int
    rooms: dict[str, int]


def entered(root: Path, words: Sequence[str], packages: Sequence[str]) -> Entered:
    """Return what `python words` enters of `packages`, folders below `root`."""
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder, "notes")
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(_WATCHING), str(root)]),
            "ENTERED_FOLDERS": os.pathsep.join(f"{root / package}{os.sep}" for package in packages),
            "ENTERED_NOTES": str(notes),
        }
        subprocess.run([sys.executable, *words], cwd=root, env=environment, stdout=sys.stderr, check=True)
        places = {*notes.read_text(encoding="utf-8").splitlines()}
    files = [Path(place.rpartition(":")[0]).relative_to(root) for place in places]
    rooms = Counter("/".join(file.parts[:2]) for file in files)
    return Entered(files=len({*files}), functions=len(places), rooms=dict(rooms.most_common()))
