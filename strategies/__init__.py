"""Strategies: transformations of a model that trade memory for work without changing its mathematics."""

from __future__ import annotations

from importlib import import_module

from strategies.base import Observation, Strategy, Tolerance
from strategies.discovery import variants
from strategies.errors import StrategyError

ac_variants = variants(import_module("strategies.ac"))
chunk_variants = variants(import_module("strategies.chunk"))
shard_variants = variants(import_module("strategies.shard"))

__all__ = [
    "Observation",
    "Strategy",
    "StrategyError",
    "Tolerance",
    "ac_variants",
    "chunk_variants",
    "shard_variants",
]
