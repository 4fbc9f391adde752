"""`chunk=budget`: what it refuses, shows and observes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from strategies import StrategyError, ac_variants
from strategies.chunk import ChunkPlan
from strategies.chunk.budget import Budget
from tests.strategies.chunk.measuring import loss_of, training_peak_bytes
from tests.strategies.chunk.models import Stack, built


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({}, "chunk: give one of chunk.budget_mib and chunk.fraction, got neither", id="nothing"),
        pytest.param(
            {"budget_mib": 1.0, "fraction": 0.5},
            "chunk: give one of chunk.budget_mib and chunk.fraction, got both",
            id="both",
        ),
        pytest.param({"budget_mib": 0}, "chunk.budget_mib: must be above 0, got 0", id="no bytes"),
        pytest.param({"fraction": -0.5}, "chunk.fraction: must be above 0, got -0.5", id="less than nothing"),
        pytest.param({"fraction": float("nan")}, "chunk.fraction: must be above 0, got nan", id="no number"),
        pytest.param({"fraction": True}, "chunk.fraction: must be above 0, got True", id="a truth value"),
    ],
)
def test_values_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(StrategyError) as caught:
        Budget(**fields)
    assert str(caught.value) == message


def test_a_budget_that_nothing_keeps_is_refused_with_the_smallest() -> None:
    model, inputs = built("fused attention")
    smallest = ChunkPlan.make(model, inputs, training=True).minimum_feasible_bytes
    with pytest.raises(StrategyError) as caught:
        Budget(budget_mib=0.001).apply(model, inputs)
    assert str(caught.value) == (
        "chunk.budget_mib: no plan keeps activations within 1048 bytes; "
        f"the smallest reachable peak is {smallest} bytes"
    )


def test_a_fraction_is_of_the_unchunked_peak_of_the_step() -> None:
    model, inputs = built("fused attention")
    unchunked = training_peak_bytes(model, inputs)
    planned = Budget(fraction=0.6).for_step(loss_of, ()).apply(model, inputs)
    training_peak_bytes(planned, inputs)
    assert training_peak_bytes(planned, inputs) <= 0.6 * unchunked


def test_it_needs_a_sample() -> None:
    with pytest.raises(
        StrategyError, match=r"^chunk: needs example inputs to plan with; give them as the sample$"
    ):
        Budget(fraction=0.5).apply(Stack())


def test_the_plan_and_the_chunks_are_observed() -> None:
    model, inputs = built("fused attention")
    strategy = Budget(fraction=0.6)
    planned = strategy.apply(model, inputs)
    planned(*inputs)
    seen = strategy.observe(planned)
    assert seen.plan is not None
    plan = seen.plan["chunk"]
    assert seen.chunks == sum(region["chunks"] for region in plan["regions"]) > 0
    assert plan["predicted_peak_bytes"] <= plan["budget_bytes"]


@pytest.mark.parametrize("view", Budget.views)
def test_views_begin_with_the_bytes(view: str) -> None:
    model, inputs = built("fused attention")
    plan = ChunkPlan.make(model, inputs, fraction=0.6, training=True)
    text = Budget(fraction=0.6).view(view, model, inputs)
    assert text.splitlines()[0] == (
        f"activations: {plan.unchunked_peak_bytes} bytes as it is, {plan.predicted_peak_bytes} bytes planned"
    )
    assert "# layers.0, layers.1" in text
    assert "loop" in text


@pytest.mark.parametrize("name", ["full", "selective_layer", "selective_op", "offload"])
def test_activation_checkpointing_comes_around(name: str) -> None:
    def step(model: nn.Module) -> list[torch.Tensor]:
        loss_of(model(*inputs)).backward()  # type: ignore[no-untyped-call]
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    model, inputs = built("fused attention")
    expected = step(model)
    model, inputs = built("fused attention")
    Budget(fraction=0.6).apply(model, inputs)
    actual = step(ac_variants[name](layers_fqn="layers").apply(model, inputs))  # type: ignore[call-arg]
    for one, other in zip(expected, actual, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)
