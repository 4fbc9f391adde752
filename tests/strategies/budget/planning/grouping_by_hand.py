"""Plans with groups, without a planner: blocks that keep a drawn share of what they make."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from strategies.budget.plan import BlockPlan, Plan
from strategies.budget.planning.block_options import CallOptions
from strategies.budget.planning.block_plans import grouped_plan
from strategies.budget.planning.block_program import planned_call
from strategies.budget.planning.group_options import Groups
from strategies.budget.planning.group_simulation import group_effect
from strategies.budget.planning.simulation import PLAIN, Decision, Effect, Work, peak_bytes
from strategies.step.step_graph import StepGraph

RANDOM_STATE_BYTES = 5056


def groups_of(graph: StepGraph) -> Groups:
    """Return the groups of a step whose blocks keep all or nothing."""
    callers = _callers(graph)
    options = [[caller.option(each) for each in (PLAIN, Decision())] for caller in callers]
    return Groups(graph, callers, options, _flops, random_state_bytes=RANDOM_STATE_BYTES)


def grouped(graph: StepGraph, spans: Sequence[tuple[int, int]], share: float, seed: int = 0) -> Plan:
    """Return a plan whose blocks from the first to the last of each span are a group; others run untouched.

    Args:
        graph: the step.
        spans: numbers of first and last blocks.
        share: share of storages that a block keeps from the second forward on.
        seed: of what is drawn.
    """
    chance = random.Random(seed)
    groups, callers = groups_of(graph), _callers(graph)
    effects = {index: caller.option(PLAIN).effect for index, caller in enumerate(callers)}
    blocks = {caller.call.fqn: BlockPlan(fqn=caller.call.fqn, plain=True) for caller in callers}
    for start, end in spans:
        calls = [caller.call for caller in callers[start : end + 1]]
        keeps = [
            frozenset(s for s in range(len(call.program.nbytes)) if chance.random() < share) for call in calls
        ]
        members = groups.members(start, end)
        effect, shares = group_effect(members, keeps, random_state_bytes=RANDOM_STATE_BYTES)
        for call, keep, each, number in zip(calls, keeps, shares, range(start, end + 1), strict=True):
            found = grouped_plan(call, keep, each, group=(calls[0].fqn, calls[-1].fqn))
            blocks[call.fqn] = replace(found, sizes=graph.calls[number].sizes)
            effects.pop(number)
        effects[start] = effect
    return plan_by_hand(graph, effects, blocks)


def plan_by_hand(graph: StepGraph, effects: Mapping[int, Effect], blocks: Mapping[str, BlockPlan]) -> Plan:
    """Return the plan of decisions that nobody has searched; its budget is its peak."""
    peak = peak_bytes(graph, list(effects.values()))
    return Plan(
        budget_bytes=peak,
        predicted_peak_bytes=peak,
        plain_peak_bytes=peak,
        minimum_feasible_bytes=peak,
        proven_minimum_bytes=0,
        step_flops=graph.flops,
        extra_flops=sum(effect.flops for effect in effects.values()),
        lower_bound_extra_flops=0,
        lower_bound_autograd_flops=0,
        model={},
        versions={"torch": torch.__version__},
        blocks=tuple(blocks.values()),
    )


def _callers(graph: StepGraph) -> list[CallOptions]:
    calls = (planned_call(graph, call) for call in graph.calls)
    return [CallOptions(graph, call, _flops, random_state_bytes=RANDOM_STATE_BYTES) for call in calls]


def _flops(work: Work) -> float:
    return work.flops
