"""Strategies: transformations of a model that trade memory for work without changing its mathematics."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from strategies.base import Observation, Strategy, StrategyError, Tolerance
from strategies.discovery import variants

if TYPE_CHECKING:
    from strategies.shard.base import Sharding

ac_variants = variants(import_module("strategies.ac"), Strategy)
eager_variants = {
    name: variant
    for name, variant in ac_variants.items()
    if not hasattr(variant, "partitioner") and find_spec(getattr(variant, "package", "torch")) is not None
}
"""Those of AC that need no compiler, nor a package that is not installed."""
chunk_variants = variants(import_module("strategies.chunk"), Strategy)
shard_variants: dict[str, type[Sharding]] = variants(
    import_module("strategies.shard"), import_module("strategies.shard.base").Sharding
)

__all__ = [
    "Observation",
    "Strategy",
    "StrategyError",
    "Tolerance",
    "ac_variants",
    "chunk_variants",
    "eager_variants",
    "shard_variants",
]
