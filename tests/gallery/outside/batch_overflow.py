"""Batches that no machine has, and arguments of a factory that are no mapping, are given on the command line.

Each ended in a traceback: `zeros(): Overflow`, an allocation that failed, an error of OmegaConf.
"""

from __future__ import annotations

from pathlib import Path

from tests.gallery.outside._commands import acbench

BEFORE = "exit 1 with a traceback, exit 1 with a traceback, exit 1 with a traceback"
RIGHT = "exit 2, exit 2, exit 2"

_FACTORY = "from torch import nn\n\ndef make():\n    return nn.ModuleDict()\n"


def answer() -> str:
    """Return how each command ends."""
    Path("factory.py").write_text(_FACTORY)
    of_python = "model=python", "model.factory=factory:make", "model.layers_fqn=blocks"
    commands = [
        ("--dry-run", f"batch_size={10**24 - 1}"),
        ("model=mlp", f"batch_size={10**14 - 1}", "tracker=none"),
        ("--dry-run", *of_python, "model.kwargs=[1,2]"),
    ]
    ends = [acbench(*words) for words in commands]
    traced = [" with a traceback" if "Traceback" in each.stderr else "" for each in ends]
    return ", ".join(f"exit {each.returncode}{how}" for each, how in zip(ends, traced, strict=True))
