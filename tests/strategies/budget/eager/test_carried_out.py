"""Plans carried out: the peak is the predicted one to the byte, and gradients are those of the plain step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from strategies.budget.planning.block_options import CallOptions
from strategies.budget.planning.block_plans import block_plan
from strategies.budget.planning.block_program import planned_call
from strategies.budget.planning.planner import Planner
from strategies.budget.planning.simulation import Decision, peak_bytes
from strategies.regions.host_copies import HostLedger
from tests.strategies.budget.planning.planning_by_hand import enclose
from tests.strategies.budget.planning.test_simulation import Flops
from tests.strategies.budget.small_steps import WIDTH, Gated, measured_peak_bytes, step_of
from tests.strategies.step.test_plan_capture import captured, captured_with


@pytest.mark.parametrize(
    ("dropout", "host_bytes"),
    [
        pytest.param(0.0, 0, id="without dropout"),
        pytest.param(0.1, 0, id="dropout"),
        pytest.param(0.1, 10_000, id="a little host memory"),
        pytest.param(0.1, 1 << 30, id="host memory for all"),
    ],
)
def test_the_peak_is_the_predicted_one_and_gradients_are_equal(dropout: float, host_bytes: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 8, WIDTH)
    model = Gated(dropout)
    step_of(model, x)()
    graph = captured(model, x)
    planner = Planner(graph, host_bytes=host_bytes)
    smallest, largest = planner.minimum_feasible_bytes, planner.plain_peak_bytes
    for share in (0.0, 0.3, 0.6, 0.9):
        plan = planner.plan(int(smallest + share * (largest - smallest)))
        plain, planned, ledger = Gated(dropout), Gated(dropout), HostLedger()
        for block in plan.blocks:
            if not block.plain:
                enclose(planned.get_submodule(block.fqn), block, ledger)
        gradients = []
        for each in (plain, planned):
            torch.manual_seed(1)
            step_of(each, x)()
            gradients.append([parameter.grad for parameter in each.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True) if a is not None)
        peak, on_host = (
            measured_peak_bytes(planned, [x], step_of(planned, x), on_host=on_host)
            for on_host in (False, True)
        )
        assert (share, peak) == (share, plan.predicted_peak_bytes)
        assert peak <= plan.budget_bytes
        assert on_host == plan.offloaded_bytes == ledger.offloaded_bytes <= host_bytes
        assert (share, host_bytes == 0) == (share, on_host == 0)


class Rewriting(nn.Module):
    """Writes to a value in place after another operator has read it."""

    def __init__(self, *, is_random: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.is_random = is_random

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = self.up(x)
        factor = torch.bernoulli(torch.full_like(x, 0.5)) if self.is_random else value
        y = (value + factor * 2).sin()
        factor.mul_(1.25) if self.is_random else factor.relu_()
        outputs: torch.Tensor = x + self.down(y.cos() * factor)
        return outputs


def trained(model: nn.Module, x: torch.Tensor) -> tuple[list[Any], int]:
    """Return gradients and the state of the generator, and the FLOPs of a step."""
    torch.manual_seed(1)
    with Flops() as flops:
        step_of(model, x)()
    return [*(each.grad for each in model.parameters()), torch.get_rng_state()], flops.count


@pytest.mark.parametrize("is_random", [False, True])
def test_a_value_that_is_written_to_after_it_was_read(*, is_random: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, WIDTH)
    model = nn.Sequential(*(Rewriting(is_random=is_random) for _ in range(3)))
    blocks = dict(model.named_children())
    expected, _ = trained(model, x)
    graph = captured_with(model, blocks, x)
    planner = Planner(graph)
    smallest, largest = planner.minimum_feasible_bytes, planner.plain_peak_bytes
    assert smallest < largest
    for share in (0.5, 0.8):
        plan = planner.plan(int(smallest + share * (largest - smallest)))
        planned = copy.deepcopy(model)
        for block in plan.blocks:
            if not block.plain:
                enclose(planned.get_submodule(block.fqn), block)
        found, flops = trained(planned, x)
        assert all(map(torch.equal, expected, found))
        assert flops == graph.flops + plan.extra_flops
        assert measured_peak_bytes(planned, [x], step_of(planned, x)) == plan.predicted_peak_bytes


class AddingInPlace(nn.Module):
    """Adds a wide value in place to one that was made before it: both are there at once."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH)
        self.wide = nn.Linear(WIDTH, 4096).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = self.up(x)
        value += self.wide(x.detach())[:, :256]
        outputs: torch.Tensor = x + self.down(value.sin())
        return outputs


@pytest.mark.parametrize("is_anew", [False, True])
def test_operators_that_write_in_place_run_in_the_order_of_forward(*, is_anew: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(AddingInPlace() for _ in range(9))), torch.randn(64, WIDTH)
    blocks = dict(model.named_children())
    expected, flops = trained(model, x)
    graph = captured_with(model, blocks, x)
    effects = []
    for each in graph.calls:
        call = planned_call(graph, each)
        again = frozenset(call.program.units[0].makes) if is_anew else frozenset[int]()
        options = CallOptions(graph, call, lambda work: work.flops, random_state_bytes=0)
        option = options.option(Decision(again=again))
        effects.append(option.effect)
        enclose(blocks[call.fqn], block_plan(call, option))
    found, with_plan = trained(model, x)
    assert [each is None for each in found] == [each is None for each in expected]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True) if a is not None)
    assert with_plan - flops == sum(effect.flops for effect in effects)
    assert measured_peak_bytes(model, [x], step_of(model, x)) == peak_bytes(graph, effects)


class WritingTwice(nn.Module):
    """Reads three times what it has written to in place, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = self.up(x)
        value.add_(1)
        value.mul_(x)
        outputs: torch.Tensor = x + value.sin() * value.cos() * value.tanh()
        return outputs


@pytest.mark.parametrize("numbers", [(1,), (2,), (1, 2), (1, 3)])
def test_what_is_written_in_place_is_written_anew_after_a_drop(numbers: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(WritingTwice(), WritingTwice()), torch.randn(64, WIDTH)
    blocks = dict(model.named_children())
    expected, _ = trained(model, x)
    graph = captured_with(model, blocks, x)
    for each in graph.calls:
        call = planned_call(graph, each)
        (value,) = call.program.units[0].makes
        assert value not in call.program.droppable, "no planner drops it, and a plan file may"
        option = CallOptions(graph, call, lambda work: work.flops, random_state_bytes=0).option(
            Decision(drops=frozenset((value, number) for number in numbers))
        )
        enclose(blocks[call.fqn], block_plan(call, option))
    found, _ = trained(model, x)
    assert [each is None for each in found] == [each is None for each in expected]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True) if a is not None)
