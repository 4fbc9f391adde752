"""The entries of the gallery: every module of `defects` and of `controls`."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from tests.gallery.case import Case
from tests.gallery.pipelines.stages import StepCase

_ROOT = Path(__file__).parent
DEFECTS, CONTROLS = (
    [each.name for each in sorted(pkgutil.iter_modules([str(_ROOT / kind)]), key=lambda found: found.name)]
    for kind in ("defects", "controls")
)
"""Names of their modules, by number."""

STEPS = sorted(
    each.name for each in pkgutil.iter_modules([str(_ROOT / "pipelines")]) if each.name.startswith("p")
)
"""Names of the modules about steps in micro-batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One module.

    Fields:
        name: file name without its ending; its digits are the number.
        module: what `CASE` stands in.
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
    def case(self) -> Case:
        """What the entry is, and what is right to say of it."""
        case: Case = self.module.CASE
        return case

    @property
    def needed(self) -> str:
        """What this machine lacks to run it; empty for nothing."""
        if self.case.needs == "compiler" and not any(map(shutil.which, ("g++", "clang++"))):
            return "a C++ compiler"
        return ""

    @property
    def code(self) -> str:
        """What the case runs: the module without its docstring, its imports and what it says of itself."""
        source = inspect.getsource(self.module)
        _, *statements, case = ast.parse(source).body
        own = [each for each in statements if not isinstance(each, ast.Import | ast.ImportFrom)]
        starts = (each.lineno - len(getattr(each, "decorator_list", ())) for each in own)
        start = min(starts, default=case.lineno)  # a control may have its model from the defect
        lines = "\n".join(source.splitlines()[start - 1 : case.lineno - 1]).strip()
        assert isinstance(case, ast.Assign)
        assert isinstance(case.value, ast.Call)
        given = {
            each.arg: ast.get_source_segment(source, each.value)
            for each in case.value.keywords
            if each.arg in {"batch", "variant"}
        }
        runs = [f"{name} = {value}" for name, value in given.items() if name != value]
        return "\n".join([lines, "", "", *runs]).strip()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEntry:
    """One module of `pipelines`, with what stands in it."""

    module: ModuleType
    case: StepCase

    @property
    def title(self) -> str:
        """The first line of the module."""
        return inspect.getdoc(self.module) or ""

    @property
    def code(self) -> str:
        """What the entry runs: the module between its imports and what it says of itself."""
        source = inspect.getsource(self.module)
        _, *statements, case = ast.parse(source).body
        first = next(each for each in statements if not isinstance(each, ast.Import | ast.ImportFrom))
        return "\n".join(source.splitlines()[first.lineno - 1 : case.lineno - 1]).strip()


def step_entries() -> dict[str, StepEntry]:
    """Return the entries about steps in micro-batches, by the name of their module."""
    modules = {name: importlib.import_module(f"tests.gallery.pipelines.{name}") for name in STEPS}
    return {name: StepEntry(module=module, case=module.CASE) for name, module in modules.items()}


def load(name: str) -> Entry | str:
    """Return the entry of a module, or the package that it needs and that is not installed."""
    source = (_ROOT / _folder(name) / f"{name}.py").read_text("utf-8")
    if 'needs="transformers"' in source and find_spec("transformers") is None:
        return "transformers"
    return Entry(name=name, module=importlib.import_module(f"tests.gallery.{_folder(name)}.{name}"))


def loaded(names: list[str]) -> Iterator[Entry]:
    """Yield the entries whose packages are installed."""
    yield from (entry for entry in map(load, names) if isinstance(entry, Entry))


def _folder(name: str) -> str:
    return "defects" if name in DEFECTS else "controls"
