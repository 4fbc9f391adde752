"""A user's factory ends its process: by `os._exit(0)`, and by a crash in native code.

The command ended with the factory's own status, 0 or 139, and left no record.
"""

from __future__ import annotations

from pathlib import Path

from tests.gallery.outside._commands import acbench, records

BEFORE = "_exit: exit 0 with 0 records, crash: exit -11 with 0 records"
RIGHT = "_exit: exit 0 with 2 records, crash: exit 0 with 2 records"

_FACTORIES = {
    "_exit": "import os\ndef make(): os._exit(0)\n",
    "crash": "import ctypes\ndef make(): ctypes.string_at(0)\n",
}


def answer() -> str:
    """Return the status of each command and how many records it left."""
    found = []
    for name, source in _FACTORIES.items():
        Path(f"of{name}.py").write_text(source)
        words = f"model=python model.factory=of{name}:make model.layers_fqn=blocks ac=none,full tracker=none"
        ended = acbench("-m", *words.split(), f"name={name}")
        found.append(f"{name}: exit {ended.returncode} with {len(records(name))} records")
    return ", ".join(found)
