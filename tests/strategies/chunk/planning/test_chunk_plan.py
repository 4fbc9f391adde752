"""Plans of forward: the budget is kept, the prediction is exact, the results are those of the plain model."""

from __future__ import annotations

import copy
import io
from functools import cache
from typing import Any

import pytest
import torch

from strategies.base import StrategyError
from strategies.chunk import ChunkPlan, InfeasibleBudget
from strategies.chunk.planning.chunk_plan import ChunkPlanner
from tests.strategies.chunk.measuring import forward_peak_bytes
from tests.strategies.chunk.models import MODELS, NAMES, WIDTH, Block, Heads, Stack, built
from tests.strategies.toys import Layers

FRACTIONS = (0.8, 0.4, 0.2)


@cache
def recorded(name: str) -> ChunkPlanner:
    model, inputs = built(name)
    return ChunkPlanner.of(model.eval(), inputs)


@cache
def smallest(name: str) -> ChunkPlan:
    """Return the smallest plan of a model; it fits every copy of it."""
    return recorded(name).plan(None)


@pytest.mark.parametrize("name", NAMES)
def test_every_accepted_budget_is_kept_and_predicted_to_the_byte(name: str) -> None:
    model, inputs = built(name)
    model.eval()
    unchunked, planning = forward_peak_bytes(model, inputs), recorded(name)
    kept = 0
    for fraction in FRACTIONS:
        budget = int(unchunked * fraction)
        try:
            plan = planning.plan(budget)
        except InfeasibleBudget as refusal:
            assert refusal.minimum_feasible_bytes > budget  # noqa: PT017 (each budget is a case)
            continue
        assert plan.unchunked_peak_bytes == unchunked
        planned = plan.apply(copy.deepcopy(model))
        planned(*inputs)
        assert forward_peak_bytes(planned, inputs) == plan.predicted_peak_bytes <= budget
        kept += 1
    assert kept >= 1


@pytest.mark.parametrize("name", MODELS)
def test_the_smallest_plan_gives_the_results_of_the_plain_model(name: str) -> None:
    model, inputs = built(name)
    model.eval()
    plan = smallest(name)
    planned = plan.apply(copy.deepcopy(model))
    with torch.no_grad():
        expected, actual = model(*inputs), planned(*inputs)
    assert plan.regions
    assert plan.predicted_peak_bytes == plan.minimum_feasible_bytes < plan.unchunked_peak_bytes
    assert (actual.dtype, actual.stride()) == (expected.dtype, expected.stride())
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_names_and_states_are_those_of_the_plain_model() -> None:
    model, _ = built("causal attention")
    expected = list(model.state_dict())
    smallest("causal attention").apply(model)
    assert list(model.state_dict()) == expected
    assert [name for name, _ in model.named_parameters()] == expected


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((1, 96, WIDTH), id="a longer sequence"),
        pytest.param((1, 17, WIDTH), id="a shorter sequence"),
        pytest.param((5, 33, WIDTH), id="a batch"),
        pytest.param((1, 1, WIDTH), id="one token"),
    ],
)
def test_other_shapes_run(shape: tuple[int, ...]) -> None:
    model, _ = built("causal attention")
    model.eval()
    planned = smallest("causal attention").apply(copy.deepcopy(model))
    other = torch.randn(shape)
    with torch.no_grad():
        torch.testing.assert_close(planned(other), model(other), rtol=1e-5, atol=1e-6)


def test_identical_blocks_have_identical_regions() -> None:
    plan = recorded("attention").plan(smallest("attention").unchunked_peak_bytes // 3)
    by_scope: dict[str, list[Any]] = {}
    for region in plan.regions:
        by_scope.setdefault(region.scope, []).append((region.operators, region.size))
    assert set(by_scope) == {"layers.0", "layers.1"}


def test_a_budget_above_the_peak_changes_nothing() -> None:
    model, _ = built("attention")
    plan = recorded("attention").plan(1 << 40)
    assert plan.regions == ()
    assert type(plan.apply(model)) is Stack


def test_a_model_is_chunked_once() -> None:
    model, _ = built("attention")
    plan = smallest("attention")
    plan.apply(model)
    with pytest.raises(StrategyError, match=r"^chunk: 'Stack' is chunked already; plan a plain model$"):
        plan.apply(model)


def test_hooks_inside_a_block_are_refused() -> None:
    model, _ = built("attention")
    plan = smallest("attention")
    block = model.get_submodule("layers.1")
    assert isinstance(block, Block)
    block.up.register_forward_hook(lambda *_: None)
    with pytest.raises(StrategyError) as caught:
        plan.apply(model)
    assert str(caught.value) == (
        "chunk: 'layers.1.up' has hooks, which a planned forward does not call; remove them"
    )


def test_hooks_of_a_block_are_called() -> None:
    model, inputs = built("attention")
    seen: list[str] = []
    model.get_submodule("layers.1").register_forward_hook(lambda *_: seen.append("called"))
    smallest("attention").apply(model)
    with torch.no_grad():
        model(*inputs)
    assert seen == ["called"]


def test_plans_need_no_memory() -> None:
    _, inputs = built("fused attention of heads")
    with torch.device("meta"):
        shadow = Heads().eval()
    there = ChunkPlan.make(shadow, tuple(each.to("meta") for each in inputs))
    assert there.to_dict() == smallest("fused attention of heads").to_dict()


def test_half_precision_stays() -> None:
    model, inputs = built("attention")
    model, inputs = model.bfloat16().eval(), tuple(each.bfloat16() for each in inputs)
    planned = ChunkPlan.make(model, inputs).apply(copy.deepcopy(model))
    with torch.no_grad():
        expected, actual = model(*inputs), planned(*inputs)
    assert actual.dtype is torch.bfloat16
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


def test_inputs_are_never_overwritten() -> None:
    model, inputs = built("attention")
    kept = [each.clone() for each in inputs]
    planned = smallest("attention").apply(model.eval())
    with torch.no_grad():
        planned(*inputs)
        block = planned.get_submodule("layers.0")
        block(*inputs)
    assert all(torch.equal(one, other) for one, other in zip(kept, inputs, strict=True))


class _Doubled(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def test_a_parametrization_inside_a_block_counts() -> None:
    model, inputs = built("attention")
    planned = smallest("attention").apply(copy.deepcopy(model.eval()))
    with torch.no_grad():
        planned(*inputs)
        for each in (model, planned):
            layer = each.get_submodule("layers.1.up")
            torch.nn.utils.parametrize.register_parametrization(layer, "weight", _Doubled())
        torch.testing.assert_close(planned(*inputs), model(*inputs), rtol=1e-5, atol=1e-6)


def test_a_parametrization_of_a_planned_module_itself_is_refused() -> None:
    model = torch.nn.Linear(WIDTH, WIDTH)
    inputs = (torch.randn(64, WIDTH),)
    planned = ChunkPlan.make(model, inputs).apply(model)
    torch.nn.utils.parametrize.register_parametrization(planned, "weight", _Doubled())
    with pytest.raises(StrategyError) as caught:
        planned(*inputs)
    assert str(caught.value) == (
        "chunk: 'the model' has another class than when its plan was applied, as parametrizations give it; "
        "change it before, then plan"
    )


class _Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.out = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.out((x @ self.weight).relu())
        return x + scaled


def test_a_parametrization_of_a_planned_block_is_refused() -> None:
    model, inputs = Layers(_Scaled(), _Scaled()), (torch.randn(64, WIDTH),)
    planned = ChunkPlan.make(model, inputs).apply(model)
    torch.nn.utils.parametrize.register_parametrization(model.layers[0], "weight", _Doubled())
    with pytest.raises(StrategyError) as caught:
        planned(*inputs)
    assert str(caught.value) == (
        "chunk: 'weight' of '_Scaled' is parametrized after the plan; parametrize first, then plan"
    )


def test_a_planned_model_is_saved_and_loaded() -> None:
    model, inputs = built("attention")
    planned = smallest("attention").apply(copy.deepcopy(model.eval()))
    file = io.BytesIO()
    with torch.no_grad():
        planned(*inputs)
        torch.save(planned, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert torch.equal(loaded(*inputs), planned(*inputs))
    assert forward_peak_bytes(loaded, inputs) == forward_peak_bytes(planned, inputs)


@pytest.mark.filterwarnings("ignore")  # of torch's own about itself
def test_a_compiled_model_runs_its_plan_as_it_is() -> None:
    model, inputs = built("attention")
    planned = smallest("attention").apply(copy.deepcopy(model.eval()))
    compiled = torch.compile(planned, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(*inputs), planned(*inputs))
