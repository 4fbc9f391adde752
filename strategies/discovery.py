"""Discovery by module name: `strategies/ac/full.py` is the variant `full`."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import TypeVar

Variant = TypeVar("Variant")


def variants(package: ModuleType, kind: type[Variant]) -> dict[str, type[Variant]]:
    """Return `{module name: the one class of `kind` that it defines}` of `package`, sorted by name.

    Modules without such a class are skipped: they hold shared code.

    Args:
        package: whose modules are looked at; `base` and packages inside it are not.
        kind: what the variants derive from.

    Raises:
        TypeError: a module defines more than one variant.
    """
    modules = pkgutil.iter_modules(package.__path__)
    names = sorted(info.name for info in modules if not info.ispkg and info.name != "base")
    found = {name: _variant_of(importlib.import_module(f"{package.__name__}.{name}"), kind) for name in names}
    return {name: variant for name, variant in found.items() if variant is not None}


def _variant_of(module: ModuleType, kind: type[Variant]) -> type[Variant] | None:
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, kind) and value.__module__ == module.__name__
    ]
    if len(found) > 1:
        raise TypeError(f"{module.__name__}: must define one {kind.__name__} at most, found {len(found)}")
    return found[0] if found else None
