"""Strategies: transformations of a model that trade memory for work without changing its mathematics."""

from __future__ import annotations

import strategies.ac
import strategies.chunk
import strategies.shard
from strategies.base import Observation, Strategy, Tolerance
from strategies.discovery import variants
from strategies.errors import StrategyError

ac_variants = variants(strategies.ac)
chunk_variants = variants(strategies.chunk)
shard_variants = variants(strategies.shard)

__all__ = [
    "Observation",
    "Strategy",
    "StrategyError",
    "Tolerance",
    "ac_variants",
    "chunk_variants",
    "shard_variants",
]
