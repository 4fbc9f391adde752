"""What chunking refuses, with the whole message; and a budget that is larger than needed, which is not."""

from __future__ import annotations

import inspect
import pickle
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies import Observation, StrategyError, ac_variants, chunk_variants
from strategies.base import PlannedStep
from strategies.budget.planning.planner import BudgetBelowMinimum
from strategies.chunk import ChunkPlan, InfeasibleBudget
from strategies.chunk.budget import Budget
from tests.strategies.chunk.models import WIDTH, Stack, built
from tests.strategies.toys import Layers

MODEL, FAST = "fused attention", "pictures"


class _Cubes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return h * h

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (h,) = ctx.saved_tensors
        outputs: Tensor = gradient * 3 * h
        return outputs


class _Layer(nn.Module):
    """A linear layer behind something that no plan repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.down(self.prepared(x))
        return outputs

    def prepared(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class _Applies(_Layer):
    def prepared(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class _Custom(_Layer):
    def prepared(self, x: Tensor) -> Tensor:
        outputs: Tensor = _Cubes.apply(x)  # type: ignore[no-untyped-call]
        return outputs


class _Stores(_Layer):
    def prepared(self, x: Tensor) -> Tensor:
        self.seen = x.mean()
        return x


class _Branches(_Layer):
    def prepared(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class _Reads(_Layer):
    def prepared(self, x: Tensor) -> Tensor:
        return x * x.max().item()


class _Chooses(_Layer):
    def prepared(self, x: Tensor) -> Tensor:
        return x[x.sum(-1) > 0]


class _Finds(_Layer):
    def prepared(self, x: Tensor) -> Tensor:
        return x * x.nonzero().size(0)


class _Draws(_Layer):
    def prepared(self, x: Tensor) -> Tensor:
        return x + torch.rand(x.shape, generator=torch.Generator().manual_seed(0))


@cache
def smallest_bytes() -> int:
    model, inputs = built(FAST)
    return ChunkPlan.make(model, inputs, training=True).minimum_feasible_bytes


VALUES = {
    "both": (
        {"budget_mib": 1.0, "fraction": 0.5},
        "chunk: give one of chunk.budget_mib and chunk.fraction, got both",
    ),
    "no bytes": ({"budget_mib": 0}, "chunk.budget_mib: must be above 0 and finite, got 0"),
    "negative bytes": ({"budget_mib": -64.0}, "chunk.budget_mib: must be above 0 and finite, got -64.0"),
    "bytes that are no number": (
        {"budget_mib": float("nan")},
        "chunk.budget_mib: must be above 0 and finite, got nan",
    ),
    "endless bytes": ({"budget_mib": float("inf")}, "chunk.budget_mib: must be above 0 and finite, got inf"),
    "a fraction of nothing": ({"fraction": 0.0}, "chunk.fraction: must be above 0 and at most 1, got 0.0"),
    "a negative fraction": ({"fraction": -0.5}, "chunk.fraction: must be above 0 and at most 1, got -0.5"),
    "more than all": ({"fraction": 1.01}, "chunk.fraction: must be above 0 and at most 1, got 1.01"),
    "a fraction that is no number": (
        {"fraction": float("nan")},
        "chunk.fraction: must be above 0 and at most 1, got nan",
    ),
    "a truth value": ({"fraction": True}, "chunk.fraction: must be above 0 and at most 1, got True"),
    "a word": ({"fraction": "half"}, "chunk.fraction: must be above 0 and at most 1, got 'half'"),
}
DEPENDS = (
    "whose result or shape depends on data; it cannot be planned; "
    "move the call out of the model, or use chunk=none"
)
MODELS = {
    "a number of the data": (_Reads, "calls aten._local_scalar_dense.default"),
    "a branch on the data": (_Branches, "calls aten._local_scalar_dense.default"),
    "a shape of the data": (_Chooses, "calls aten.index.Tensor"),
    "a size of the data": (_Finds, "calls aten.nonzero.default"),
}
OPAQUE = {
    "a generator of its own": (
        _Draws,
        (
            "'layers.0' calls aten.rand.generator{line} with a generator of its own, which no graph can "
            "hold; let it draw from torch's own"
        ),
    ),
    "a function with a backward of its own": (
        _Custom,
        (
            "'layers.0' calls the custom autograd function '_Cubes', whose backward would be lost: chunks "
            "are recomputed from the forward graph; rewrite it with torch operators, or use chunk=none"
        ),
    ),
    "a tensor that is kept": (
        _Stores,
        "'layers.0' sets 'layers.0.seen', which a planned forward would not repeat; return it instead",
    ),
}


def _line(layer: type[_Layer]) -> str:
    """Return the place of the one line of what stands before the linear layer."""
    _, first = inspect.getsourcelines(layer.prepared)
    return f" in test_refusals.py:{first + 1}"


@pytest.mark.parametrize(("fields", "message"), VALUES.values(), ids=VALUES)
def test_values(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(StrategyError) as caught:
        Budget(**fields)
    assert str(caught.value) == message


def test_no_budget() -> None:
    with pytest.raises(StrategyError) as caught:
        Budget().apply(nn.Linear(WIDTH, WIDTH), (torch.randn(2, WIDTH),))
    assert str(caught.value) == (
        "chunk: give one of chunk.budget_mib and chunk.fraction, got neither; without one it follows "
        "ac=budget"
    )


@pytest.mark.parametrize(("layer", "problem"), MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(
    ("strategy", "where"),
    [(Budget(fraction=0.5), "chunk.fraction"), (chunk_variants["minimum"](), "chunk")],
    ids=["budget", "minimum"],
)
def test_models(layer: type[_Layer], problem: str, strategy: Any, where: str) -> None:
    with pytest.raises(StrategyError) as caught:
        strategy.apply(Layers(layer(), layer()), (torch.randn(2, 3, WIDTH),))
    assert str(caught.value) == f"{where}: 'layers.0' {problem}{_line(layer)}, {DEPENDS}"


class _Nests(_Layer):
    def prepared(self, x: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor_from_jagged(x.reshape(-1, WIDTH), torch.tensor([0, 2, 6]))
        return rows.values().view_as(x)


class _Marks(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.kind = "marked"  # type: ignore[attr-defined]
        return y

    def prepared(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("layer", "problem"),
    [
        pytest.param(
            _Nests,
            f"'layers.0' makes a nested tensor{_line(_Nests)}, which no graph can hold; pad it",
            id="a nested tensor",
        ),
        pytest.param(
            _Marks,
            "'layers.0' returns a tensor with the attribute 'kind', which no graph can hold; "
            "return it beside the tensor",
            id="an attribute of a result",
        ),
    ],
)
def test_tensors_that_no_graph_can_hold(layer: type[_Layer], problem: str) -> None:
    with pytest.raises(StrategyError) as caught:
        ChunkPlan.make(Layers(layer(), layer()), (torch.randn(2, 3, WIDTH),), training=True, fraction=0.6)
    assert str(caught.value) == f"chunk.budget: {problem}"


def test_an_input_with_an_attribute() -> None:
    model, x = Layers(_Applies(), _Applies()), torch.randn(2, 3, WIDTH)
    plan = ChunkPlan.make(model, (x,), training=True)
    x.kind = "marked"  # type: ignore[attr-defined]
    problem = (
        "forward is called with a tensor that has the attribute 'kind', which no graph can hold; "
        "give it as an input of its own"
    )
    with pytest.raises(StrategyError) as caught:
        ChunkPlan.make(model, (x,), training=True)
    assert str(caught.value) == f"chunk.budget: {problem}"
    with pytest.raises(StrategyError) as caught:
        plan.apply(model)(x)
    assert str(caught.value) == f"chunk: {problem}"


@pytest.mark.parametrize(("layer", "problem"), OPAQUE.values(), ids=OPAQUE)
def test_what_is_not_cut_is_named_where_no_plan_keeps_the_budget(layer: type[_Layer], problem: str) -> None:
    model, inputs = Layers(layer(), layer()), (torch.randn(2, 3, WIDTH, requires_grad=True),)
    with pytest.raises(InfeasibleBudget) as caught:
        Budget(fraction=0.5).apply(model, inputs)
    reason = problem.format(line=_line(layer))
    assert str(caught.value).endswith(f"; 'layers.0' is not cut: {reason}; nor are 1 more")


@pytest.mark.parametrize(
    "refusal",
    [
        pytest.param(InfeasibleBudget("chunk.fraction", 3, 7, "; nothing cuts it"), id="chunks"),
        pytest.param(BudgetBelowMinimum(3, 7, 5, " on the host"), id="activation checkpointing"),
    ],
)
def test_a_refusal_reaches_the_process_that_asked(refusal: InfeasibleBudget | BudgetBelowMinimum) -> None:
    other = pickle.loads(pickle.dumps(refusal))
    assert str(other) == str(refusal)
    assert other.minimum_feasible_bytes == 7


def test_a_model_that_has_no_kernel_without_data_is_named() -> None:
    class Foreign(_Layer):
        def prepared(self, x: Tensor) -> Tensor:
            return torch.from_numpy(x.detach().numpy() * 2)

    with pytest.raises(StrategyError) as caught:
        ChunkPlan.make(Layers(Foreign(), Foreign()), (torch.randn(2, 3, WIDTH),))
    assert str(caught.value).startswith(
        f"chunk.budget: 'layers.0' cannot be followed without data{_line(Foreign)}, where it raises "
        "RuntimeError: "
    )
    assert str(caught.value).endswith("; move the call out of the model, or use chunk=none")


ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "a tensor for a tuple": (
        {"sample": torch.randn(2, 3, WIDTH)},
        "chunk.budget: the sample must be a tuple of positional inputs, got a Tensor",
    ),
    "both budgets": (
        {"budget_bytes": 1, "fraction": 0.5},
        "chunk.budget: give one of budget_bytes and fraction, got both",
    ),
    "a word for a fraction": (
        {"fraction": "half"},
        "chunk.fraction: must be above 0 and at most 1, got 'half'",
    ),
    "no number": ({"fraction": float("nan")}, "chunk.fraction: must be above 0 and at most 1, got nan"),
    "a fraction of nothing": ({"fraction": 0}, "chunk.fraction: must be above 0 and at most 1, got 0"),
    "twice of all": ({"fraction": 2.0}, "chunk.fraction: must be above 0 and at most 1, got 2.0"),
}


@pytest.mark.parametrize(("given", "message"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments(given: dict[str, Any], message: str) -> None:
    model, inputs = built(MODEL)
    with pytest.raises(StrategyError) as caught:
        ChunkPlan.make(model, **{"sample": inputs, **given})
    assert str(caught.value) == message


@pytest.mark.parametrize("budget", [0, -5, 2.5, True])
def test_a_plan_needs_a_positive_number_of_bytes(budget: Any) -> None:
    model, inputs = built(MODEL)
    with pytest.raises(StrategyError) as caught:
        ChunkPlan.make(model, inputs, budget)
    assert str(caught.value) == f"chunk.budget: must be a whole number of bytes, at least 1, got {budget!r}"


@pytest.mark.parametrize("missing_bytes", [1, 1000])
def test_a_budget_below_the_smallest_peak(missing_bytes: int) -> None:
    model, inputs = built(FAST)
    budget_bytes = smallest_bytes() - missing_bytes
    with pytest.raises(InfeasibleBudget) as caught:
        Budget(budget_mib=budget_bytes / (1 << 20)).apply(model, inputs)
    assert caught.value.minimum_feasible_bytes == smallest_bytes()
    assert str(caught.value) == (
        f"chunk.budget_mib: no plan keeps activations within {budget_bytes} bytes; "
        f"the smallest reachable peak is {smallest_bytes()} bytes"
    )


def test_an_operator_that_nothing_cuts_is_named() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Upsample(scale_factor=2, mode="bicubic"), nn.ReLU())
    with pytest.raises(InfeasibleBudget) as caught:
        ChunkPlan.make(model, (torch.zeros(2, 3, 8, 8),), 1000, training=True)
    assert str(caught.value).endswith(" bytes; nothing cuts aten.upsample_bicubic2d.default, which '1' calls")


def test_no_sample() -> None:
    with pytest.raises(StrategyError) as caught:
        Budget(fraction=0.5).apply(Stack())
    assert str(caught.value) == "chunk: needs example inputs to plan with; give them as the sample"


@pytest.mark.parametrize(
    "strategy", [Budget(budget_mib=1e300), Budget(fraction=1)], ids=["endless", "all that there is"]
)
def test_a_budget_larger_than_needed_chunks_nothing_and_says_so(strategy: Budget) -> None:
    model, inputs = built(MODEL)
    planned = strategy.apply(model, inputs)
    assert type(planned) is Stack
    assert strategy.observe(planned) == Observation(
        chunks=0, unneeded="activations fit the budget as they are: nothing runs in chunks"
    )


def test_regions_inside_of_a_block() -> None:
    model, inputs = built(MODEL)
    ac = ac_variants["full"](module_classes=("Attention",))  # type: ignore[call-arg]
    step = PlannedStep(enclose=ac.apply)
    with pytest.raises(StrategyError) as caught:
        Budget(fraction=0.5).for_step(step).apply(model, inputs)
    assert str(caught.value) == (
        "ac: the region around 'layers.0.attention' would never run, because chunk replaces the forward of "
        "its block; put regions around whole blocks, or use chunk=none"
    )
