"""The entries of the gallery: every module of `defects` and of `controls`."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.gallery.facts import Control, Defect

_ROOT = Path(__file__).parent
DEFECTS, CONTROLS = (
    [each.name for each in sorted(pkgutil.iter_modules([str(_ROOT / kind)]), key=lambda found: found.name)]
    for kind in ("defects", "controls")
)
"""Names of their modules, by number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One module.

    Fields:
        name: file name without its ending; its digits are the number.
        module: what `make`, `batch`, `variant` and `FACTS` stand in.
    """

    name: str
    module: ModuleType

    @property
    def number(self) -> int:
        """The number, which an entry keeps for ever."""
        return int(self.name[1:3])

    @property
    def title(self) -> str:
        """The first line of the module."""
        return inspect.getdoc(self.module) or ""

    @property
    def facts(self) -> Any:
        """What the entry says of itself: a `Defect` or a `Control`."""
        facts: Defect | Control = self.module.FACTS
        return facts

    @property
    def needed(self) -> str:
        """What this machine lacks to run it; empty for nothing."""
        if self.facts.needs == "compiler" and not any(map(shutil.which, ("g++", "clang++"))):
            return "a C++ compiler"
        return ""

    @property
    def code(self) -> str:
        """The module without its docstring, imports and facts."""
        lines = inspect.getsource(self.module).splitlines()
        start = next(index for index, line in enumerate(lines) if line.startswith("FACTS"))
        end = start if lines[start].endswith(")") else lines.index(")", start)
        return "\n".join(lines[end + 1 :]).strip()


def load(name: str) -> Entry | str:
    """Return the entry of a module, or the package that it needs and that is not installed."""
    source = (_ROOT / _folder(name) / f"{name}.py").read_text("utf-8")
    if "from transformers" in source and find_spec("transformers") is None:
        return "transformers"
    return Entry(name=name, module=importlib.import_module(f"tests.gallery.{_folder(name)}.{name}"))


def loaded(names: list[str]) -> Iterator[Entry]:
    """Yield the entries whose packages are installed."""
    yield from (entry for entry in map(load, names) if isinstance(entry, Entry))


def _folder(name: str) -> str:
    return "defects" if name in DEFECTS else "controls"
