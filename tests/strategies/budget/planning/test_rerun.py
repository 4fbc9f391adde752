"""Blocks that run again as a whole: bytes and work are the predicted ones, and who never does."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from strategies.budget.eager.carrying_out import enclose
from strategies.budget.plan import Plan
from strategies.budget.planning.block_options import CallOptions
from strategies.budget.planning.block_plans import block_plan
from strategies.budget.planning.block_program import planned_call
from strategies.budget.planning.cost import Objective
from strategies.budget.planning.planner import Planner
from strategies.budget.planning.rerun import rerun_of
from strategies.budget.planning.simulation import PLAIN, RERUN, Decision
from strategies.estimate import machine
from strategies.regions.blocks import ModelModules
from strategies.step.step_graph import StepGraph
from tests.strategies.budget.eager.test_chained_tape import Mixed
from tests.strategies.budget.planning.grouping_by_hand import RANDOM_STATE_BYTES, plan_by_hand
from tests.strategies.budget.planning.test_simulation import Flops
from tests.strategies.budget.small_steps import (
    WIDTH,
    Discarding,
    Gated,
    GatedBlock,
    WithBlocks,
    measured_peak_bytes,
    step_of,
)
from tests.strategies.step.test_plan_capture import captured

TOKENS, X = torch.randint(0, 32, (4, 8)), torch.randn(4, 8, WIDTH)


class Nested(nn.Module):
    """Takes inputs by position and by name, one of which it does not read, and returns a nest of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, given: dict[str, Any], *, scale: Tensor, unread: Tensor) -> dict[str, Any]:
        x, (y, *_) = given["x"], given["others"]
        gate, value = self.up(x).chunk(2, -1)
        return {"x": x + self.down(torch.cat([gate * value, y], -1)) * scale, "others": (value.sin(), unread)}


class Nests(WithBlocks):
    """Blocks that all get one mask, and one that each reads; half of the weights are frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [Nested() for _ in range(3)]
        for block in blocks[1:]:
            block.up.requires_grad_(requires_grad=False)
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        scale, unread = x.mean(-1, keepdim=True).exp(), x > 0
        given: dict[str, Any] = {"x": x, "others": (x * 2, None)}
        for block in self.layers:
            given = block(given, scale=scale, unread=unread)
        total: Tensor = given["x"] + given["others"][0]
        return total


def by_hand(graph: StepGraph, decisions: list[Decision]) -> Plan:
    """Return the plan of decisions about all calls; a call that may not run again as a whole is plain."""
    calls = [planned_call(graph, call) for call in graph.calls]
    effects, blocks = {}, {}
    for number, (call, decision) in enumerate(zip(calls, decisions, strict=True)):
        rerun = rerun_of(graph, number, calls)
        caller = CallOptions(graph, call, lambda _: 0.0, random_state_bytes=RANDOM_STATE_BYTES, rerun=rerun)
        option = caller.option(PLAIN if rerun is None and decision.is_rerun else decision)
        effects[number] = option.effect
        blocks[call.fqn] = replace(block_plan(call, option), sizes=graph.calls[number].sizes)
    return plan_by_hand(graph, effects, blocks)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("make", "x", "whole"),
    [
        pytest.param(Gated, X, 4, id="products"),
        pytest.param(lambda: Gated(0.1), X, 4, id="dropout"),
        pytest.param(lambda: Gated(0.1), X[:2], 4, id="the peak lies where a block runs again"),
        pytest.param(Nests, X, 3, id="nests"),
        pytest.param(Discarding, X, 3, id="results that nobody reads"),
        pytest.param(lambda: Mixed(0.1), TOKENS, 4, id="mixed"),
    ],
)
def test_bytes_and_work_are_the_predicted_ones(
    make: Callable[[], WithBlocks], x: Tensor, whole: int, seed: int
) -> None:
    plain, planned, graph = make(), make(), captured(make(), x)
    calls = [planned_call(graph, call) for call in graph.calls]
    assert sum(rerun_of(graph, number, calls) is not None for number in range(len(calls))) == whole
    chance = random.Random(seed)
    pinned = [Decision(keep=call.program.pinned) for call in calls]
    plan = by_hand(graph, [RERUN if not seed else chance.choice([RERUN, PLAIN, each]) for each in pinned])
    enclose(plan, ModelModules(blocks=planned.blocks))
    for _ in range(2):
        found = []
        for model in (plain, planned):
            torch.manual_seed(1)
            with Flops() as flops:
                step_of(model, x)()
            found.append((flops.count, [each.grad for each in model.parameters()], torch.get_rng_state()))
        (flops, gradients, state), (more, found_gradients, found_state) = found
        assert more - flops == plan.extra_flops
        assert torch.equal(state, found_state)
        for a, b in zip(gradients, found_gradients, strict=True):
            assert (a is None) == (b is None)
            assert a is None or b is None or torch.equal(a, b)
        peak = measured_peak_bytes(planned, [x], step_of(planned, x))
        assert peak == plan.predicted_peak_bytes


class Odd(GatedBlock):
    """Its forward does something besides."""

    def __init__(self, besides: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.calls, self.besides = nn.BatchNorm1d(8), 0, besides
        self.seen: list[Any] = []
        self.shift = nn.Buffer(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.besides(self, x))


def counts(block: Any, x: Tensor) -> Tensor:
    block.calls += 1
    return x


def appends(block: Any, x: Tensor) -> Tensor:
    block.seen.append(x.shape)
    return x


def draws(block: Any, x: Tensor) -> Tensor:  # noqa: ARG001 (as all)
    return x * (1 + random.random())


def checkpoints(block: Any, x: Tensor) -> Tensor:
    checkpointed: Tensor = checkpoint(block.norms[0], x, use_reentrant=False)
    return checkpointed


class Changed(Gated):
    """Blocks of which the second is odd; what the model does around them is, too."""

    def __init__(
        self, besides: Callable[[Any, Tensor], Tensor], after: Callable[[Any, Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.layers[1] = Odd(besides)
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        for block in self.layers:
            y = block(x)
            x = self.after(self, x) * 0 + y if block is self.layers[1] else y
        return x


def hooked(model: Changed) -> Changed:
    model.get_submodule("layers.1.norms.0").register_forward_hook(lambda *_: None)
    return model


def same(_: Any, x: Tensor) -> Tensor:
    return x


def counts_later(model: Any, x: Tensor) -> Tensor:
    model.layers[1].calls += 1
    return x


def written_later(_: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.detach().mul_(1)


def shifts_later(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.layers[1].shift.add_(1)
    return x


class AsksForWeightAgain(torch.autograd.Function):
    """Multiplies by a weight, and looks at it twice in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.saved_tensors[0] + 0 * ctx.saved_tensors[0], None


def asks_again(block: Any, x: Tensor) -> Tensor:
    y: Tensor = AsksForWeightAgain.apply(x, block.shift)
    return y


def reads_a_buffer(block: Any, x: Tensor) -> Tensor:
    y: Tensor = x + block.shift
    return y


def casts(block: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y: Tensor = block.norms[0](x)
    return y.float()


@pytest.mark.parametrize(
    ("model", "is_whole"),
    [
        pytest.param(lambda: Changed(same, same), True, id="nothing odd"),
        pytest.param(lambda: Changed(lambda block, x: block.norm(x), same), False, id="batch norm"),
        pytest.param(lambda: Changed(lambda _, x: x.mul_(0.5), same), False, id="writes to its input"),
        pytest.param(lambda: Changed(counts, same), False, id="counts its calls"),
        pytest.param(lambda: Changed(appends, same), False, id="appends to a list"),
        pytest.param(lambda: Changed(draws, same), False, id="draws from Python"),
        pytest.param(lambda: Changed(same, draws), True, id="the model draws from Python"),
        pytest.param(lambda: Changed(checkpoints, same), False, id="a checkpoint of its own"),
        pytest.param(lambda: Changed(lambda block, x: block.norms[0](x), same), True, id="a norm more"),
        pytest.param(lambda: hooked(Changed(same, same)), False, id="a hook inside"),
        pytest.param(lambda: Changed(asks_again, same), False, id="a function asks again for what it saved"),
        pytest.param(lambda: Changed(same, counts_later), False, id="an attribute set before backward"),
        pytest.param(lambda: Changed(same, written_later), False, id="its input is written to"),
        pytest.param(lambda: Changed(reads_a_buffer, same), True, id="reads a buffer"),
        pytest.param(lambda: Changed(reads_a_buffer, shifts_later), False, id="its buffer is written to"),
        pytest.param(lambda: Changed(casts, same), False, id="autocast inside"),
        pytest.param(lambda: Changed(same, lambda model, x: model.layers[1](x)), False, id="called twice"),
    ],
)
def test_a_block_runs_again_as_a_whole_only_where_that_is_right(
    model: Callable[[], Changed], *, is_whole: bool
) -> None:
    graph = captured(model(), X)
    calls = [planned_call(graph, call) for call in graph.calls]
    found = [
        rerun_of(graph, number, calls) is not None
        for number, call in enumerate(calls)
        if call.fqn == "layers.1"
    ]
    assert set(found) == {is_whole}


@pytest.mark.parametrize(
    ("objective", "taped_s", "is_whole"), [("time", 1.0, True), ("time", 0.0, False), ("flops", 1.0, False)]
)
def test_time_decides_between_a_tape_and_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, objective: Objective, taped_s: float, *, is_whole: bool
) -> None:
    monkeypatch.setitem(machine.PYTHON_S, "taped", taped_s)
    graph = captured(Gated(), X)
    planner = Planner(graph, objective=objective)
    plan = planner.plan((planner.minimum_feasible_bytes + 2 * planner.plain_peak_bytes) // 3)
    assert any(block.rerun for block in plan.blocks) == is_whole
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    assert Plan.from_dict(plan.to_dict()) == plan
