"""Model families: frozen specifications that build plain modules.

One module a family, found by module name: `harness/models/gpt.py` is `family: gpt`.
Modules shared by families are in `parts/`.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from types import ModuleType

from harness.models.base import Batch, LanguageModelSpec, ModelSpec


@functools.cache
def families() -> dict[str, type[ModelSpec]]:
    """Return `{family: its one ModelSpec class}`, sorted by family.

    Raises:
        TypeError: a module defines no specification, or more than one.
    """
    modules = (info.name for info in pkgutil.iter_modules(__path__) if not info.ispkg and info.name != "base")
    return {name: _only_spec(importlib.import_module(f"{__name__}.{name}")) for name in sorted(modules)}


def _only_spec(module: ModuleType) -> type[ModelSpec]:
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, ModelSpec) and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise TypeError(f"{module.__name__}: must define exactly one ModelSpec, found {len(found)}")
    return found[0]


__all__ = ["Batch", "LanguageModelSpec", "ModelSpec", "families"]
