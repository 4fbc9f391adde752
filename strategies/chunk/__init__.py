"""The chunk variants, one module a variant, found by module name; and the plans that they make."""

from strategies.chunk.planning.chunk_plan import ChunkPlan, InfeasibleBudget, PlannedRegion

__all__ = ["ChunkPlan", "InfeasibleBudget", "PlannedRegion"]
