"""Discovery by module name: `strategies/ac/full.py` is the variant `full`."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from strategies.base import Strategy


def variants(package: ModuleType) -> dict[str, type[Strategy]]:
    """Return `{module name: its one Strategy class}` for the modules of `package`, sorted by name.

    Raises:
        TypeError: a module defines no strategy, or more than one.
    """
    names = sorted(info.name for info in pkgutil.iter_modules(package.__path__))
    return {name: _only_strategy(importlib.import_module(f"{package.__name__}.{name}")) for name in names}


def _only_strategy(module: ModuleType) -> type[Strategy]:
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Strategy) and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise TypeError(f"{module.__name__}: must define exactly one Strategy, found {len(found)}")
    return found[0]
