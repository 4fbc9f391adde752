"""Plans of one model to choose from, from few loops to the smallest peak, for who plans more than chunks."""

from __future__ import annotations

from strategies.chunk.planning.chunk_plan import ChunkPlan, ChunkPlanner

_STEPS = 4
"""Between the peak without loops and the smallest one, in equal ratios."""


def offers(planner: ChunkPlanner) -> list[ChunkPlan]:
    """Return plans of less and less memory, the last with the smallest peak; none where no loop lowers it."""
    most, smallest = planner.unchunked_peak_bytes, planner.plan(None)
    least = smallest.predicted_peak_bytes
    budgets = [int(most * (least / most) ** (step / _STEPS)) for step in range(1, _STEPS)]
    found: list[ChunkPlan] = []
    for plan in (*map(planner.plan, budgets), smallest):
        is_known = any(_decides(plan) == _decides(other) for other in found)
        if plan.regions and plan.predicted_peak_bytes < most and not is_known:
            found.append(plan)
    return found


def _decides(plan: ChunkPlan) -> object:
    schedulers = plan.schedulers.items()
    return plan.loss is None, {fqn: (each.decisions, each.recomputes) for fqn, each in schedulers}
