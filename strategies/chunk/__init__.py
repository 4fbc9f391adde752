"""The chunk variants, one module a variant, found by module name; and the plans that they make."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from strategies.base import InfeasibleBudget

if TYPE_CHECKING:
    from strategies.chunk.planning.chunk_plan import ChunkPlan
    from strategies.chunk.planning.scope_schedules import PlannedRegion

__all__ = ["ChunkPlan", "InfeasibleBudget", "PlannedRegion"]


def __getattr__(name: str) -> Any:
    """Return a class of plans; the planner is imported when somebody first asks for one."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("strategies.chunk.planning.chunk_plan"), name)
