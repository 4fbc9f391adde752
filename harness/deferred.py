"""Imports that wait: torch, and the rooms that work with it, load when something first reads from them.

The driver composes a sweep, refuses points and looks for finished records without torch, which takes
seconds to import. So `acbench` calls `install` before it imports anything else. Ranks, tests and other
programs do not call it: there every import is an ordinary one.

Modules that the driver reads follow one rule: they write `import torch` and `from strategies.regions import
blocks`, never names from these modules, because `from torch import nn` needs `nn` at once and runs torch.

`python -X importtime` shows the time of such a module under its first reader, not under its importer.

Threads may read at the same time: one at a time runs what waits. Their functions import nothing, because a
thread that imports from a package while another runs it may wait for it for ever.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from threading import RLock
from types import ModuleType
from typing import Any

LIBRARIES = ("torch",)
"""Packages that wait; what lies in them is imported with them."""

ROOMS = (
    "harness.launchers.lane",
    "harness.launchers.slurm_submit",
    "harness.models.parts",
    "harness.predict",
    "harness.ranks.entry",
    "harness.ranks.nodes",
    "harness.trial",
    "strategies.budget",
    "strategies.chunk.flow",
    "strategies.chunk.loops",
    "strategies.chunk.planning",
    "strategies.chunk.running",
    "strategies.chunk.show",
    "strategies.estimate",
    "strategies.generators",
    "strategies.nested",
    "strategies.regions",
    "strategies.shard.candidates",
    "strategies.shard.linear",
    "strategies.shard.model",
    "strategies.shard.operators",
    "strategies.step",
    "strategies.tracing",
)
"""Modules that wait, and packages with all modules below them."""


def install() -> None:
    """Let imports of the modules above wait from now on; calling it again changes nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Deferred(ModuleType):
    """A module that has not run to its end. Before it runs it has no `__path__`, so an import inside runs it.

    What the thread that runs it reads meanwhile is as in any module that is being imported.
    """

    def __getattr__(self, name: str) -> Any:
        _run(self)
        return ModuleType.__getattribute__(self, name)

    def __setattr__(self, name: str, value: object) -> None:
        _run(self)
        ModuleType.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        _run(self)
        ModuleType.__delattr__(self, name)

    def __dir__(self) -> Iterable[str]:
        _run(self)
        return ModuleType.__dir__(self)


@dataclass(slots=True)
class _Waiting(Loader):
    """Loads a module without running it, and runs it once.

    Fields:
        lock: held while a module runs; one for all.
        error: what running it raised, for every reader.
    """

    real: Loader
    lock: RLock
    begun: bool = False
    error: BaseException | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).pop("__path__", None)
        vars(module)["__waiting__"] = self
        module.__class__ = _Deferred

    def run(self, module: ModuleType) -> None:
        """Run `module` and make an ordinary one of it, or leave nothing in it of a run that fails."""
        self.begun = True
        before, spec = dict(vars(module)), module.__spec__
        assert spec is not None
        module.__loader__ = spec.loader = self.real
        if spec.submodule_search_locations is not None:
            module.__path__ = spec.submodule_search_locations
        try:
            self.real.exec_module(module)
        except AttributeError as error:  # `hasattr` would take it for its answer
            self.error = ImportError(f"{module.__name__}: {error}", name=module.__name__)
            raise self.error from error
        except BaseException as error:  # Ctrl-C too: torch's extensions cannot be imported a second time
            self.error = error
            raise
        else:
            module.__class__ = ModuleType
            del module.__waiting__
        finally:
            if self.error is not None:
                for name in vars(module).keys() - before.keys():
                    del vars(module)[name]
                vars(module).update(before)


def _run(module: ModuleType) -> None:
    """Run `module`, unless that has begun in this thread or has ended; raise what running it raised."""
    waiting = vars(module).get("__waiting__")
    if waiting is None:
        return
    with waiting.lock:
        if waiting.error is not None:
            raise waiting.error
        if not waiting.begun:
            waiting.run(module)


@dataclass(frozen=True, slots=True)
class _Present(Loader):
    """Gives the module that running its package has imported meanwhile, instead of the one that Python made.

    Fields:
        module: as it was imported; it may wait itself.
    """

    module: ModuleType

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = self.module


@dataclass(frozen=True)
class _Finder(MetaPathFinder):
    """Finds the modules of the tables as the other finders do, and lets them wait; it finds no reload."""

    lock: RLock = field(default_factory=RLock)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of the tables, with a loader that waits."""
        if target is not None:
            return None
        if name in sys.modules and _waits(name.rpartition(".")[0]):  # the look for its path ran its package
            return spec_from_loader(name, _Present(sys.modules[name]))
        if not _waits(name):
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Waiting(spec.loader, self.lock)
        return spec


def _waits(name: str) -> bool:
    return name in LIBRARIES or any(name == room or name.startswith(f"{room}.") for room in ROOMS)
