"""SciPy, imported by what solves a programme and by nothing else: it takes half a second."""

from __future__ import annotations

import importlib
from types import ModuleType


def scipy(name: str) -> ModuleType:
    """Return `scipy.<name>`."""
    return importlib.import_module(f"scipy.{name}")
