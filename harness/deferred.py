"""Imports that wait: torch, and the rooms that work with it, load when something first reads from them.

The driver composes a sweep, refuses points and looks for finished records without torch, which takes
seconds to import. So `acbench` calls `install` before it imports anything else. Ranks, tests and other
programs do not call it: there every import is an ordinary one.

Modules that the driver reads follow one rule: they write `import torch` and `from strategies.regions import
blocks`, never names from these modules, because `from torch import nn` needs `nn` at once and runs torch.

Not for several threads that import at the same time: a command imports in its main thread.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

LIBRARIES = ("torch",)
"""Packages that wait; what lies in them is imported with them."""

ROOMS = (
    "harness.launchers.lane",
    "harness.launchers.slurm_submit",
    "harness.models.parts",
    "harness.ranks.entry",
    "harness.ranks.nodes",
    "harness.trial",
    "strategies.chunk.flow",
    "strategies.chunk.loops",
    "strategies.chunk.planning",
    "strategies.chunk.running",
    "strategies.chunk.show",
    "strategies.estimate",
    "strategies.nested",
    "strategies.regions",
    "strategies.shard.candidates",
    "strategies.shard.linear",
    "strategies.shard.model",
    "strategies.shard.operators",
    "strategies.tracing",
)
"""Modules that wait, and packages with all modules below them."""


def install() -> None:
    """Let imports of the modules above wait from now on; calling it again changes nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Deferred(ModuleType):
    """A module that has not run. It has no `__path__`, so importing something inside it runs it first."""

    def __getattr__(self, name: str) -> Any:
        """Run the module, because `name` is asked for, and return it."""
        loader = self.__loader__
        assert isinstance(loader, _Waiting)
        loader.run(self)
        return getattr(self, name)


@dataclass(frozen=True, slots=True)
class _Waiting(Loader):
    """Loads a module without running it.

    Fields:
        real: runs it.
    """

    real: Loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = _Deferred
        vars(module).pop("__path__", None)

    def run(self, module: ModuleType) -> None:
        """Make an ordinary module of `module` and run it; where that fails, the next reader tries again."""
        spec = module.__spec__
        assert spec is not None
        module.__class__ = ModuleType
        module.__loader__ = spec.loader = self.real
        if spec.submodule_search_locations is not None:
            module.__path__ = spec.submodule_search_locations
        try:
            self.real.exec_module(module)
        except BaseException:
            module.__loader__ = spec.loader = self
            self.exec_module(module)
            raise


@dataclass(frozen=True, slots=True)
class _Present(Loader):
    """Gives the module that running its package has imported meanwhile.

    Fields:
        module: as it was imported.
        spec: its own, which Python replaces by the one that was asked for.
    """

    module: ModuleType
    spec: ModuleSpec | None

    def create_module(self, spec: ModuleSpec) -> ModuleType:  # noqa: ARG002 (the protocol of loaders)
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


class _Finder(MetaPathFinder):
    """Finds the modules of the tables, as the other finders do, and lets them wait."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in sys.modules:  # looking up the path of its package has run that
            found = sys.modules[name]
            return spec_from_loader(name, _Present(module=found, spec=found.__spec__))
        if not _waits(name):
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Waiting(spec.loader)
        return spec


def _waits(name: str) -> bool:
    return name in LIBRARIES or any(name == room or name.startswith(f"{room}.") for room in ROOMS)
