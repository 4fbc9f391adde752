"""Predicted bytes and FLOPs of any decisions are those of the executor, to the byte."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from strategies.budget.eager.planned_block import PlannedBlock, PlannedModule
from strategies.budget.planning.block_options import CallOptions
from strategies.budget.planning.block_program import PlannedCall, planned_call
from strategies.budget.planning.planner import block_plan
from strategies.budget.planning.simulation import PLAIN, Decision, peak_bytes
from strategies.estimate.flops import flops_of
from strategies.regions.host_copies import HostLedger
from strategies.regions.region import enclose
from strategies.step.operator_mode import OperatorMode
from tests.strategies.budget.small_steps import WIDTH, Gated, measured_peak_bytes, step_of
from tests.strategies.step.test_plan_capture import captured


class Flops(OperatorMode):
    """Counts the FLOPs of all operators."""

    count = 0

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        self.count += flops_of(func, args, kwargs, result)
        return result


def decisions(calls: Sequence[PlannedCall], moved: float, anew: float, *, seed: int) -> list[Decision]:
    """Return decisions that hold none, some, most or all of what a block makes, a share of it on the host.

    A share of what they do not hold is made anew for each reader.
    """
    chance = random.Random(seed)
    found = []
    for call in calls:
        share = chance.choice([0, 0.2, 0.5, 0.9, None])
        held = {s for s in range(len(call.program.nbytes)) if chance.random() < (share or 0)}
        offload = {
            s for s in sorted(call.program.movable) if chance.random() < moved and (s < 0 or s in held)
        }
        fleeting = frozenset(s for s in sorted(call.program.fleeting - held) if chance.random() < anew)
        decision = Decision(keep=frozenset(held - offload), offload=frozenset(offload), again=fleeting)
        found.append(PLAIN if share is None else decision)
    return found


@pytest.mark.parametrize(
    ("dropout", "moved", "anew"), [(0.0, 0.0, 0.0), (0.1, 0.0, 0.0), (0.1, 0.5, 0.5), (0.0, 0.0, 1.0)]
)
def test_predicted_bytes_and_flops_are_measured(dropout: float, moved: float, anew: float) -> None:
    model, x = Gated(dropout), torch.randn(4, 16, WIDTH)
    graph = captured(model, x)
    calls = [planned_call(graph, call) for call in graph.calls]
    callers = [
        CallOptions(graph, call, lambda effect: effect.flops, random_state_bytes=5056) for call in calls
    ]
    for seed in range(5):
        chosen = decisions(calls, moved, anew, seed=seed)
        options = [caller.option(decision) for caller, decision in zip(callers, chosen, strict=True)]
        effects = [option.effect for option in options]
        planned, ledger = copy.deepcopy(model), HostLedger()
        for call, option in zip(calls, options, strict=True):
            plan = block_plan(call, option)
            if not plan.plain:
                enclose(planned.blocks[call.fqn], PlannedModule(block=PlannedBlock(plan=plan, ledger=ledger)))
        run = step_of(planned, x)
        assert measured_peak_bytes(planned, [x], run) == peak_bytes(graph, effects)
        assert ledger.offloaded_bytes == sum(effect.host_bytes for effect in effects)
        with Flops() as flops:
            run()
        assert flops.count == graph.flops + sum(effect.flops for effect in effects)
