"""Plans of forward and backward: gradients, budgets and random numbers are those of the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from strategies.base import PlannedStep
from strategies.chunk import ChunkPlan, InfeasibleBudget
from strategies.chunk.planning.chunk_plan import ChunkPlanner
from strategies.chunk.running.chunked_forward import ChunkedForward, chunked_forwards
from strategies.chunk.running.runtime import ChunkLoop
from tests.strategies.chunk.measuring import loss_of, training_peak_bytes
from tests.strategies.chunk.models import NAMES, Stack, built

STEP = PlannedStep(loss=loss_of)
SCALARS_BYTES = 64


@cache
def recorded(name: str) -> ChunkPlanner:
    return ChunkPlanner.of(*built(name), training=True, step=STEP)


def gradients(model: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    loss_of(model(*inputs)).backward()  # type: ignore[no-untyped-call]
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_the_smallest_plan_are_those_of_the_plain_model(name: str) -> None:
    model, inputs = built(name)
    plan = recorded(name).plan(None)
    planned = plan.apply(copy.deepcopy(model))
    expected, actual = gradients(model, inputs), gradients(planned, inputs)
    assert plan.regions
    assert list(actual) == list(expected)
    largest = max(gradient.abs().max() for gradient in expected.values())
    for key, gradient in expected.items():
        assert (actual[key] - gradient).abs().max() <= 1e-5 * largest, key


@pytest.mark.parametrize("name", ["language model with loss", "pictures"])
def test_accepted_budgets_are_kept(name: str) -> None:
    model, inputs = built(name)
    unchunked, planning = training_peak_bytes(model, inputs), recorded(name)
    kept = 0
    for fraction in (0.8, 0.4):
        budget = int(unchunked * fraction)
        try:
            plan = planning.plan(budget)
        except InfeasibleBudget as refusal:
            assert refusal.minimum_feasible_bytes > budget  # noqa: PT017 (each budget is a case)
            continue
        planned = plan.apply(copy.deepcopy(model))
        gradients(planned, inputs)
        assert training_peak_bytes(planned, inputs) <= plan.predicted_peak_bytes <= budget
        kept += 1
    assert kept >= 1


def test_dropout_draws_the_same_masks() -> None:
    torch.manual_seed(0)
    model, inputs = Stack(1, dropout=0.3, fused=True), (torch.randn(2, 32, 32),)
    plan = ChunkPlan.make(model, inputs, training=True)
    planned = plan.apply(copy.deepcopy(model))
    assert plan.regions
    torch.manual_seed(3)
    expected = model(*inputs)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    actual = planned(*inputs)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_a_plan_of_forward_alone_trains_too() -> None:
    model, inputs = built("a mask of places")
    planned = ChunkPlan.make(model, inputs).apply(copy.deepcopy(model))
    expected, actual = gradients(model, inputs), gradients(planned, inputs)
    for key, gradient in expected.items():
        torch.testing.assert_close(actual[key], gradient, rtol=1e-4, atol=1e-6)


def test_inputs_get_gradients() -> None:
    model, (x,) = built("fused attention of heads")
    planned = recorded("fused attention of heads").plan(None).apply(copy.deepcopy(model))
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss_of(model(one)).backward()  # type: ignore[no-untyped-call]
    loss_of(planned(other)).backward()  # type: ignore[no-untyped-call]
    assert one.grad is not None
    assert other.grad is not None
    torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-7)


def test_what_is_detached_stays_detached() -> None:
    class Detaching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Stack(1)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.inner(x)
            outputs: Tensor = hidden * hidden.detach().mean(-1, keepdim=True)
            return outputs

    torch.manual_seed(0)
    model, inputs = Detaching(), (torch.randn(1, 48, 32),)
    planned = ChunkPlan.make(model, inputs, training=True).apply(copy.deepcopy(model))
    expected, actual = gradients(model, inputs), gradients(planned, inputs)
    for key, gradient in expected.items():
        torch.testing.assert_close(actual[key], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.matrix), 0.3])
def test_blocks_run_again_in_backward_where_that_is_enough(dropout: float) -> None:
    torch.manual_seed(0)
    model, inputs = Stack(3, dropout=dropout, fused=True), (torch.randn(2, 32, 32),)
    plan = ChunkPlan.make(model, inputs, fraction=0.8, training=True, step=STEP)
    assert plan.recomputed
    assert plan.to_dict()["recomputed"] == list(plan.recomputed)
    assert not plan.regions
    planned = plan.apply(copy.deepcopy(model))
    assert gradients(planned, inputs).keys() == gradients(model, inputs).keys()
    assert training_peak_bytes(planned, inputs) == plan.predicted_peak_bytes
    for key, gradient in gradients(model, inputs).items():
        assert torch.equal(gradients(planned, inputs)[key], gradient), key


def test_autocast_reaches_the_blocks() -> None:
    class Dtypes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func in {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}:
                seen.add(result.dtype)
            return result

    seen: set[torch.dtype] = set()
    model, inputs = Stack(1, fused=True), (torch.randn(2, 32, 32),)
    step = PlannedStep(loss=loss_of, autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    planned = ChunkPlan.make(model, inputs, training=True, step=step).apply(model)
    with torch.autocast("cpu", torch.bfloat16):
        planned(*inputs)  # makes the programs
        with Dtypes():
            planned(*inputs)
    assert seen == {torch.bfloat16}


def test_a_loop_that_nobody_reads_does_not_run_again() -> None:
    model, inputs = Stack(2, fused=True), (torch.randn(2, 32, 32),)
    plan = ChunkPlan.make(model, inputs, training=True, step=STEP)
    planned = plan.apply(copy.deepcopy(model))
    gradients(planned, inputs)  # makes the programs
    ran: list[ChunkLoop] = []
    # blocks like each other share their loops
    loops = [loop for fqn in plan.recomputed for loop in loops_of(chunked_forwards(planned)[fqn])]
    for loop in set(loops):
        loop.body.register_forward_hook(lambda *_, loop=loop: ran.append(loop))  # type: ignore[misc]
    gradients(planned, inputs)
    assert {loop.is_unread for loop in loops} == {False, True}
    for loop in loops:
        assert ran.count(loop) == loops.count(loop) * loop.chunks * (1 if loop.is_unread else 2)


def loops_of(forward: ChunkedForward) -> tuple[ChunkLoop, ...]:
    assert forward.programs.latest is not None
    return forward.programs.latest.code.loops


@pytest.mark.parametrize(
    "loss", [functional.mse_loss, functional.smooth_l1_loss, functional.l1_loss, functional.huber_loss]
)
def test_losses_that_hold_their_elements_are_predicted(loss: Callable[..., Tensor]) -> None:
    class Judged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return loss(self.linear(x), x)

    model, inputs = Judged(), (torch.randn(64, 32),)
    predicted_bytes = ChunkPlanner.of(model, inputs, training=True, step=STEP).unchunked_peak_bytes
    assert 0 <= predicted_bytes - training_peak_bytes(model, inputs) <= SCALARS_BYTES
