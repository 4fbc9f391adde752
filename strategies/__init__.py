"""Strategies: transformations of a model that trade memory for work without changing its mathematics.

This is the door for all who use strategies: their contract, and the variants, which are found by module name:
`strategies/ac/full.py` is the variant `full`.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from strategies.base import (
    CallSite,
    InfeasibleBudget,
    LossInputs,
    Observation,
    OffersPlans,
    Partition,
    PlannedStep,
    PlansFromStep,
    RunnableStep,
    Strategy,
    StrategyError,
    Tolerance,
    held_chunks,
)

if TYPE_CHECKING:
    from strategies.shard.base import Sharding

Variant = TypeVar("Variant")


def variants(package: ModuleType, kind: type[Variant]) -> dict[str, type[Variant]]:
    """Return `{module name: the one class of `kind` that it defines}` of `package`, sorted by name.

    Modules without such a class are skipped: they hold shared code.

    Args:
        package: whose modules are looked at; `base` and packages inside it are not.

    Raises:
        TypeError: a module defines more than one variant.
    """
    modules = pkgutil.iter_modules(package.__path__)
    names = sorted(info.name for info in modules if not info.ispkg and info.name != "base")
    found = {name: _variant_of(import_module(f"{package.__name__}.{name}"), kind) for name in names}
    return {name: variant for name, variant in found.items() if variant is not None}


def _variant_of(module: ModuleType, kind: type[Variant]) -> type[Variant] | None:
    """Return the one variant that a module itself defines, `None` where it defines none."""
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, kind) and value.__module__ == module.__name__
    ]
    if len(found) > 1:
        raise TypeError(f"{module.__name__}: must define one {kind.__name__} at most, found {len(found)}")
    return found[0] if found else None


if TYPE_CHECKING:
    ac_variants: dict[str, type[Strategy]]
    eager_variants: dict[str, type[Strategy]]
    """Those of AC that need no compiler, no names, file or code of the user's, and no missing package."""
    chunk_variants: dict[str, type[Strategy]]
    shard_variants: dict[str, type[Sharding]]


def __getattr__(name: str) -> Any:
    """Import the variants of a kind when somebody asks for them: all of them take longer than torch."""
    found: dict[str, Any]
    match name:
        case "ac_variants" | "chunk_variants":
            found = variants(import_module(f"strategies.{name.partition('_')[0]}"), Strategy)
        case "shard_variants":
            found = variants(
                import_module("strategies.shard"), import_module("strategies.shard.base").Sharding
            )
        case "eager_variants":
            found = {
                name: variant for name, variant in __getattr__("ac_variants").items() if _is_eager(variant)
            }
        case _:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def _is_eager(variant: type[Strategy]) -> bool:
    return (
        variant.partitioner is Strategy.partitioner
        and not variant.needs_instructions
        and find_spec(getattr(variant, "package", "torch")) is not None
    )


__all__ = [
    "CallSite",
    "InfeasibleBudget",
    "LossInputs",
    "Observation",
    "OffersPlans",
    "Partition",
    "PlannedStep",
    "PlansFromStep",
    "RunnableStep",
    "Strategy",
    "StrategyError",
    "Tolerance",
    "ac_variants",
    "chunk_variants",
    "eager_variants",
    "held_chunks",
    "shard_variants",
    "variants",
]
