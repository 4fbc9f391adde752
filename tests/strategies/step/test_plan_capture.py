"""Captured steps: what is written down, and that the bytes of the plain step follow to the byte."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import distributed as dist
from torch import nn

from strategies import StrategyError
from strategies.ac.full import Full
from strategies.budget.plan import input_value
from strategies.budget.planning.block_program import planned_call
from strategies.budget.planning.simulation import PLAIN, effect_of, peak_bytes
from strategies.estimate.host import host_allocation
from strategies.estimate.machine import MACHINES
from strategies.regions.blocks import ModelModules
from strategies.step.plan_capture import capture
from strategies.step.step_graph import StepGraph
from strategies.tracing.fakes import Fakes
from tests.strategies.budget.small_steps import (
    WIDTH,
    Discarding,
    Gated,
    WithBlocks,
    measured_peak_bytes,
    step_of,
)

CPU = torch.device("cpu")


def captured(model: WithBlocks, x: torch.Tensor, lasting: frozenset[str] = frozenset()) -> StepGraph:
    return captured_with(model, model.blocks, x, lasting)


def captured_with(
    model: nn.Module, blocks: dict[str, nn.Module], x: torch.Tensor, lasting: frozenset[str] = frozenset()
) -> StepGraph:
    model.zero_grad()
    modules, standing = ModelModules(blocks=blocks), [*model.parameters(), x]
    return capture(step_of(model, x), modules, device=CPU, standing=standing, lasting=lasting)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(Gated, id="without random numbers"),
        pytest.param(partial(Gated, 0.1), id="with dropout"),
        pytest.param(Discarding, id="with results that nobody reads"),
    ],
)
@pytest.mark.parametrize("is_fake", [False, True])
def test_the_plain_step_follows_from_the_captured_one(
    make: Callable[[], WithBlocks], *, is_fake: bool
) -> None:
    real, x = make(), torch.randn(2, 8, WIDTH)
    expected = measured_peak_bytes(real, [x], step_of(real, x))
    if is_fake:
        with Fakes():
            graph = captured(make(), torch.randn(2, 8, WIDTH))
    else:
        graph = captured(real, x)
    calls = [planned_call(graph, call) for call in graph.calls]
    effects = [effect_of(call, PLAIN, random_state_bytes=5056) for call in calls]
    assert peak_bytes(graph, effects) == expected
    assert graph.held_bytes.max() < expected


class _Exponential(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        outputs: torch.Tensor = torch.linalg.matrix_exp(0.01 * y @ y.mT) @ y
        return outputs


def test_what_has_no_formula_costs_the_flops_that_its_seconds_are_worth() -> None:
    model = Gated(blocks=1)
    model.layers[0] = _Exponential()
    graph = captured(model, torch.randn(2, 8, WIDTH))
    found = [each for each in graph.operators if each.name == "aten.linalg_matrix_exp.default"]
    assert found
    assert all(each.flops == MACHINES["cpu"].flops_in(each.seconds) > 0 for each in found)


@pytest.mark.parametrize("lasting", [frozenset[str](), frozenset({"aten.silu.default"})])
def test_operators_that_last_do_not_run_again(lasting: frozenset[str]) -> None:
    graph = captured(Gated(blocks=1), torch.randn(2, 8, WIDTH), lasting)
    stays = {each.name for each in graph.operators if each.is_forward and not each.is_repeatable}
    assert "aten.silu.default" in {each.name for each in graph.operators}
    assert stays == lasting


def test_gradients_are_those_of_the_plain_step() -> None:
    model, x = Gated(), torch.randn(2, 8, WIDTH)
    step_of(model, x)()
    expected = [parameter.grad for parameter in model.parameters()]
    captured(model, x)
    found = [parameter.grad for parameter in model.parameters()]
    assert all(
        a is not None and b is not None and torch.equal(a, b) for a, b in zip(expected, found, strict=True)
    )


def test_equal_blocks_have_equal_programs_and_the_model_is_as_it_was() -> None:
    model, x = Gated(), torch.randn(2, 8, WIDTH)
    before = [(type(module), set(vars(module))) for module in model.modules()]
    graph = captured(model, x)
    assert [(type(module), set(vars(module))) for module in model.modules()] == before
    first, *others = [planned_call(graph, call).program for call in graph.calls]
    assert len(set(others)) == 1
    assert not first.inputs  # no operator of the step has made it
    assert [value for _, value in others[0].inputs] == [input_value(0)]
    assert len({graph.fingerprint(call) for call in graph.calls}) == 1
    assert [call.fqn for call in graph.calls] == list(model.blocks)


def test_storages_on_the_host_have_no_bytes() -> None:
    model, x = Gated(blocks=1), torch.randn(2, 8, WIDTH)

    def run() -> None:
        with host_allocation():
            table = torch.ones(8, WIDTH)
        model(x + table).sum().backward()

    graph = capture(run, ModelModules(blocks=model.blocks), device=CPU, standing=[*model.parameters(), x])
    (table,) = next(each for each in graph.operators if "ones" in each.name).makes
    (added,) = next(each for each in graph.operators if table in each.reads).makes
    assert (graph.nbytes[table], graph.nbytes[added]) == (0, x.nbytes)


def test_a_checkpointed_model_is_refused() -> None:
    model = Full(layers_fqn="layers").apply(Gated())
    assert isinstance(model, Gated)
    with pytest.raises(StrategyError, match=r"^ac: 'layers\.0' is already checkpointed; capture"):
        captured(model, torch.randn(2, 8, WIDTH))


def test_a_step_without_blocks_is_refused() -> None:
    model = Gated()
    with pytest.raises(
        StrategyError,
        match=r"^ac\.layers_fqn: no block ran in the step; .*; name modules that the model calls$",
    ):
        capture(lambda: None, ModelModules(blocks=model.blocks), device=CPU)


class OfTorchFunc(nn.Linear):
    """Differentiates by torch.func."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gradient: torch.Tensor = torch.func.grad(lambda h: h.sin().sum())(super().forward(x))
        return gradient


def test_ranks_refuse_a_block_of_torch_func_by_an_error_of_the_public_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    model = nn.Sequential(OfTorchFunc(WIDTH, WIDTH))
    with pytest.raises(StrategyError, match="'0' differentiates by") as found:
        captured_with(model, {"0": model[0]}, torch.randn(2, WIDTH))
    assert found.type is StrategyError  # ranks report the name, which makes a trial a refused one
