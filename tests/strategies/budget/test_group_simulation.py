"""Groups of blocks carried out: predicted bytes and FLOPs are measured, gradients are those of the plain model."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from strategies.budget.block_options import CallOptions
from strategies.budget.block_program import planned_call
from strategies.budget.carrying_out import enclose
from strategies.budget.group_options import Groups
from strategies.budget.group_simulation import group_effect
from strategies.budget.plan import BlockPlan, Plan
from strategies.budget.planning import Planner, grouped_plan
from strategies.budget.simulation import PLAIN, peak_bytes
from strategies.budget.step_graph import StepGraph
from tests.strategies.budget.small_steps import WIDTH, Gated, measured_peak_bytes, step_of
from tests.strategies.budget.test_capture import captured
from tests.strategies.budget.test_simulation import Flops

RANDOM_STATE = 5056


def grouped(graph: StepGraph, spans: list[tuple[int, int]], share: float, seed: int) -> tuple[list[Any], Plan]:
    """Return effects and plan of groups whose blocks keep a share of what they make, drawn."""
    chance = random.Random(seed)
    calls = [planned_call(graph, call) for call in graph.calls]
    callers = [
        CallOptions(graph, call, lambda effect: effect.flops, random_state_bytes=RANDOM_STATE) for call in calls
    ]
    options = [caller.all() for caller in callers]
    groups = Groups(graph, callers, options, lambda effect: effect.flops, random_state_bytes=RANDOM_STATE)
    blocks = {call.fqn: BlockPlan(fqn=call.fqn, plain=True) for call in calls}
    effects = [callers[index].option(PLAIN).effect for index in range(len(calls))]
    for start, end in spans:
        keeps = [
            frozenset(s for s in range(len(call.program.nbytes)) if chance.random() < share)
            for call in calls[start : end + 1]
        ]
        effect, shares = group_effect(groups.members(start, end), keeps, random_state_bytes=RANDOM_STATE)
        fqns = calls[start].fqn, calls[end].fqn
        for call, keep, each in zip(calls[start : end + 1], keeps, shares, strict=True):
            blocks[call.fqn] = grouped_plan(call, keep, each, fqns)
        effects[start : end + 1] = [effect]
    planner = Planner(graph, nests=False)
    plan = planner.plan(planner.plain_peak_bytes)
    from dataclasses import replace
    return effects, replace(plan, blocks=tuple(blocks.values()))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_predicted_bytes_and_flops_of_groups_are_measured(dropout: float) -> None:
    model, x = Gated(dropout, blocks=5), torch.randn(4, 16, WIDTH)
    graph = captured(model, x)
    for seed, (spans, share) in enumerate(
        [([(0, 4)], 0.0), ([(1, 3)], 0.0), ([(1, 3)], 0.3), ([(0, 2)], 0.6), ([(3, 4)], 0.9), ([(0, 4)], 0.5)]
    ):
        effects, plan = grouped(graph, spans, share, seed)
        plain, planned = Gated(dropout, blocks=5), Gated(dropout, blocks=5)
        enclose(plan, planned.blocks)
        gradients = []
        for each in (plain, planned):
            torch.manual_seed(1)
            step_of(each, x)()
            gradients.append([parameter.grad for parameter in each.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True) if a is not None)
        run = step_of(planned, x)
        with Flops() as flops:
            run()
        assert (seed, flops.count) == (seed, graph.flops + sum(effect.flops for effect in effects))
        assert (seed, measured_peak_bytes(planned, [x], run)) == (seed, peak_bytes(graph, effects))
