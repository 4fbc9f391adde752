"""Predicted bytes and FLOPs of any decisions are those of the executor, to the byte."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from strategies.budget.eager.planned_block import PlannedBlock, PlannedModule
from strategies.budget.planning.block_options import CallOptions
from strategies.budget.planning.block_plans import block_plan
from strategies.budget.planning.block_program import PlannedCall, planned_call
from strategies.budget.planning.simulation import PLAIN, Decision, peak_bytes, schedules_of
from strategies.estimate.flops import flops_of
from strategies.regions.host_copies import HostLedger
from strategies.regions.region import enclose
from strategies.step.operator_mode import OperatorMode
from tests.strategies.budget.planning.simulating_by_hand import uses
from tests.strategies.budget.small_steps import WIDTH, Gated, WithBlocks, measured_peak_bytes, step_of
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

    A share of what they do not hold is made anew for each reader. As large a share of what may run often, be
    it held or not, is dropped after some requests.
    """
    chance = random.Random(seed)
    found = []
    for call in calls:
        share = chance.choice([0, 0.2, 0.5, 0.9, None])
        held = {s for s in range(len(call.program.nbytes)) if chance.random() < (share or 0)}
        offload = {
            s for s in sorted(call.program.movable) if chance.random() < moved and (s < 0 or s in held)
        }
        fleeting = frozenset(s for s in sorted(call.program.fleeting_chains - held) if chance.random() < anew)
        decision = Decision(keep=frozenset(held - offload), offload=frozenset(offload), again=fleeting)
        drops = frozenset(each for each in droppable(call, decision) if chance.random() < anew)
        decision = replace(decision, drops=drops)
        found.append(PLAIN if share is None else decision)
    return found


def droppable(call: PlannedCall, decision: Decision) -> Iterator[tuple[int, int]]:
    """Yield what may be dropped under a decision, with each number of requests that others follow."""
    program = call.program
    for storage, count in sorted(uses(schedules_of(call, decision), 0).items()):
        is_inner = storage >= 0 and storage not in decision.again | decision.offload | program.pinned
        if is_inner and program.units[program.runs.makers[storage]].is_repeatable:
            yield from ((storage, number) for number in range(1, count))


@pytest.mark.parametrize(
    ("dropout", "moved", "anew"),
    [(0.0, 0.0, 0.0), (0.1, 0.0, 0.0), (0.1, 0.0, 1.0), (0.1, 0.5, 0.5), (0.0, 0.0, 0.3), (0.0, 0.0, 1.0)],
)
def test_predicted_bytes_and_flops_are_measured(dropout: float, moved: float, anew: float) -> None:
    model, x = Gated(dropout), torch.randn(4, 16, WIDTH)
    graph = captured(model, x)
    calls = [planned_call(graph, call) for call in graph.calls]
    callers = [CallOptions(graph, call, lambda work: work.flops, random_state_bytes=5056) for call in calls]
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


class Sorted(nn.Module):
    """Reads the sorted input twice; backward asks for the order as well, which the same operator makes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = (x * 2).sort().values
        return values.sin() * values.cos()


class SortedBlock(WithBlocks):
    """A scale, and one block."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList([Sorted()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layers[0](x * self.scale)
        return outputs


class Unused(nn.Module):
    """Gives a second result, which nobody goes on with."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.inner(x)
        return y.tanh(), y.square().mean()


class UnusedBlock(WithBlocks):
    """One block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Unused()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layers[0](x)[0]
        return outputs


def test_what_is_saved_for_an_unused_result_is_counted_on_the_host() -> None:
    model, x = UnusedBlock(), torch.randn(64, WIDTH)
    graph = captured(model, x)
    call = planned_call(graph, graph.calls[0])
    caller = CallOptions(graph, call, lambda work: work.flops, random_state_bytes=5056)
    option = caller.option(Decision(keep=frozenset({1}), offload=frozenset({0})))
    ledger = HostLedger()
    plan = block_plan(call, option)
    enclose(model.blocks["layers.0"], PlannedModule(block=PlannedBlock(plan=plan, ledger=ledger)))
    assert measured_peak_bytes(model, [x], step_of(model, x)) == peak_bytes(graph, [option.effect])
    assert ledger.offloaded_bytes == option.effect.host_bytes == x.nbytes


def test_every_fate_of_each_saved_value_has_the_predicted_bytes() -> None:
    model, x = SortedBlock(), torch.randn(64, WIDTH)
    graph = captured(model, x)
    (call,) = (planned_call(graph, call) for call in graph.calls)
    caller = CallOptions(graph, call, lambda work: work.flops, random_state_bytes=5056)
    saved, fates = sorted(call.program.saved), ("keep", "offload", "again", "recompute")
    assert (len(saved), len(call.program.fleeting & call.program.saved)) == (4, 3)
    for chosen in product(fates, repeat=len(saved)):
        of = {
            fate: frozenset(s for s, each in zip(saved, chosen, strict=True) if each == fate)
            for fate in fates
        }
        if not of["again"] <= call.program.fleeting:
            continue
        option = caller.option(Decision(keep=of["keep"], offload=of["offload"], again=of["again"]))
        planned, plan = copy.deepcopy(model), block_plan(call, option)
        if not plan.plain:
            block = PlannedBlock(plan=plan, ledger=HostLedger())
            enclose(planned.blocks[call.fqn], PlannedModule(block=block))
        peak = measured_peak_bytes(planned, [x], step_of(planned, x))
        assert (chosen, peak) == (chosen, peak_bytes(graph, [option.effect]))
