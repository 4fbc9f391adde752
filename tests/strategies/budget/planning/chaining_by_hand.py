"""Plans with chains, without a planner: blocks that keep a drawn share of what they make."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from strategies.budget.plan import BlockPlan, Plan
from strategies.budget.planning.block_options import CallOptions
from strategies.budget.planning.block_plans import chained_plans
from strategies.budget.planning.block_program import BlockProgram, planned_call
from strategies.budget.planning.chains import chained_call
from strategies.budget.planning.simulation import PLAIN, Decision, Work
from strategies.step.step_graph import StepGraph
from tests.strategies.budget.planning.grouping_by_hand import RANDOM_STATE_BYTES, plan_by_hand


def drawn(program: BlockProgram, share: float, chance: random.Random) -> Decision:
    """Return a decision that keeps a share of the storages, and makes half of the fleeting ones anew."""
    some = frozenset(s for s in range(len(program.nbytes)) if chance.random() < share)
    keep = program.completed(some - program.older | program.pinned)
    return Decision(keep=keep, again=frozenset(s for s in program.fleeting - keep if chance.random() < 0.5))


def in_chains(graph: StepGraph, spans: Sequence[tuple[int, int]], share: float, seed: int = 0) -> Plan:
    """Return a plan whose blocks of each span, from the first to the one before the end, are a chain.

    Others run untouched.

    Args:
        graph: the step.
        spans: numbers of first blocks, and of those behind the last.
        share: share of storages that a chain keeps.
        seed: of what is drawn.
    """
    chance = random.Random(seed)
    calls = [planned_call(graph, call) for call in graph.calls]
    effects = {index: _caller(graph, index, index + 1).option(PLAIN).effect for index in range(len(calls))}
    blocks = {call.fqn: BlockPlan(fqn=call.fqn, plain=True) for call in calls}
    for start, end in spans:
        caller = _caller(graph, start, end)
        option = caller.option(drawn(caller.call.program, share, chance))
        assert not option.decision.is_plain
        plans = chained_plans(calls[start:], caller.call, option)
        for number, plan in enumerate(plans, start):
            call = graph.calls[number]
            fields: dict[str, Any] = {
                "sizes": call.sizes,
                "caller": call.caller,
                "caller_sizes": call.caller_sizes,
            }
            blocks[plan.fqn] = replace(plan, before=call.before, **fields)
            effects.pop(number)
        effects[start] = option.effect
    return plan_by_hand(graph, effects, blocks)


def _caller(graph: StepGraph, start: int, end: int) -> CallOptions:
    call = planned_call(graph, graph.calls[start]) if end == start + 1 else chained_call(graph, start, end)
    return CallOptions(graph, call, _flops, random_state_bytes=RANDOM_STATE_BYTES)


def _flops(work: Work) -> float:
    return work.flops
