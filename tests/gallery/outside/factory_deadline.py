"""A factory has little time on a machine where the import of torch takes longer than that.

The import was cut off, and the command ended with a traceback and no record.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.gallery.outside._commands import ENVIRONMENT, MODEL, PROGRAM, records

BEFORE = "0 records, no factory is blamed"
RIGHT = "2 records, no factory is blamed"


_SLOW = """import sys, time

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            time.sleep(5)

sys.meta_path.insert(0, Slow())
"""


def answer() -> str:
    """Return how many records there are, and whose fault it is said to be."""
    Path("quick.py").write_text(MODEL)
    Path("sitecustomize.py").write_text(_SLOW)  # a cold file system
    words = "model=python model.factory=quick:make model.layers_fqn=blocks ac=none,full protocol=parity"
    ended = subprocess.run(
        [*PROGRAM, "-m", *words.split(), "protocol.deadline_s=3", "tracker=none", "name=d"],
        env=ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([str(Path.cwd()), ENVIRONMENT["PYTHONPATH"]])},
        capture_output=True,
        text=True,
        check=False,
    )
    is_blamed = "did not return within" in ended.stderr
    return f"{len(records('d'))} records, {'the' if is_blamed else 'no'} factory is blamed"
