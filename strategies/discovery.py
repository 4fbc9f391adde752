"""Discovery by module name: `strategies/ac/full.py` is the variant `full`."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from strategies.base import Strategy


def variants(package: ModuleType) -> dict[str, type[Strategy]]:
    """Return `{module name: its one Strategy class}` for the modules of `package`, sorted by name.

    A module without a strategy is no variant but what variants are built from.

    Raises:
        TypeError: a module defines more than one strategy.
    """
    modules = pkgutil.iter_modules(package.__path__)
    names = sorted(info.name for info in modules if not info.ispkg and info.name != "base")
    found = {name: _strategy_of(importlib.import_module(f"{package.__name__}.{name}")) for name in names}
    return {name: strategy for name, strategy in found.items() if strategy is not None}


def _strategy_of(module: ModuleType) -> type[Strategy] | None:
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Strategy) and value.__module__ == module.__name__
    ]
    if len(found) > 1:
        raise TypeError(f"{module.__name__}: must define one Strategy at most, found {len(found)}")
    return found[0] if found else None
