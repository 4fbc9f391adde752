"""`chunk=budget`: what it keeps, shows and observes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from strategies import ac_variants
from strategies.base import PlannedStep
from strategies.budget.kept import kept_by
from strategies.chunk import ChunkPlan
from strategies.chunk.budget import Budget
from tests.strategies.chunk.measuring import loss_of, training_peak_bytes
from tests.strategies.chunk.models import built


@pytest.fixture(autouse=True)
def _planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each plan once: all tests plan copies of one model with the same inputs."""
    make = ChunkPlan.make

    def remembered(
        _model: nn.Module, _sample: tuple[torch.Tensor, ...], *budget: Any, **options: Any
    ) -> ChunkPlan:
        key = repr((budget, sorted(options.items())))
        if key not in PLANS:
            PLANS[key] = make(_model, _sample, *budget, **options)
        return PLANS[key]

    monkeypatch.setattr(ChunkPlan, "make", remembered)


PLANS: dict[str, ChunkPlan] = {}


def test_a_fraction_is_of_the_unchunked_peak_of_the_step() -> None:
    model, inputs = built("fused attention")
    unchunked = training_peak_bytes(model, inputs)
    planned = Budget(fraction=0.3).for_step(PlannedStep(loss=loss_of)).apply(model, inputs)
    training_peak_bytes(planned, inputs)
    assert training_peak_bytes(planned, inputs) <= 0.3 * unchunked


class _Memory(dict[str, str]):
    """Keeps texts of JSON values."""

    def read(self, name: str) -> Any:
        return json.loads(self.get(name, "null"))

    def write(self, name: str, found: Any) -> None:
        self[name] = json.dumps(found)


def test_a_plan_that_somebody_keeps_is_not_sought_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sought, make = list[str](), ChunkPlan.make

    def counted(*arguments: Any, **options: Any) -> ChunkPlan:
        sought.append(options["where"])
        return make(*arguments, **options)

    monkeypatch.setattr(ChunkPlan, "make", counted)
    seen = []
    with kept_by(_Memory()):
        for key in ("model", "model", "another", "", ""):
            model, inputs = built("fused attention")
            strategy = Budget(fraction=0.3)
            planned = strategy.for_step(PlannedStep(loss=loss_of), key=key).apply(model, inputs)
            seen.append((training_peak_bytes(planned, inputs), strategy.observe(planned)))
    assert sought == ["chunk.fraction"] * 4
    assert seen == [seen[0]] * 5


@pytest.mark.parametrize("times", [0.25, 0.5, 2])
def test_a_shorter_input_stays_below_the_planned_bytes_and_a_longer_one_below_their_share(
    times: float,
) -> None:
    model, inputs = built("fused attention")
    plan = ChunkPlan.make(model, inputs, fraction=0.3, training=True)
    others = tuple(torch.randn(each.shape[0], int(times * each.shape[1]), *each.shape[2:]) for each in inputs)
    unchunked = training_peak_bytes(model, others)
    planned = plan.apply(model)
    training_peak_bytes(planned, others)
    assert plan.budget_bytes is not None
    assert training_peak_bytes(planned, others) <= max(float(plan.budget_bytes), 0.3 * unchunked)


def test_the_plan_and_the_chunks_are_observed() -> None:
    model, inputs = built("fused attention")
    strategy = Budget(fraction=0.3)
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
    plan = ChunkPlan.make(model, inputs, fraction=0.3, training=True)
    text = Budget(fraction=0.3).view(view, model, inputs)
    assert text.splitlines()[0] == (
        f"activations: {plan.unchunked_peak_bytes} bytes as it is, {plan.predicted_peak_bytes} bytes planned"
    )
    assert "\n# layers.0" in text
    assert "loop" in text


@pytest.mark.parametrize("name", ["full", "selective_layer", "selective_op", "offload"])
def test_activation_checkpointing_comes_around(name: str) -> None:
    def step(model: nn.Module) -> list[torch.Tensor]:
        loss_of(model(*inputs)).backward()  # type: ignore[no-untyped-call]
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    model, inputs = built("fused attention")
    expected = step(model)
    model, inputs = built("fused attention")
    Budget(fraction=0.3).apply(model, inputs)
    actual = step(ac_variants[name](layers_fqn="layers").apply(model, inputs))  # type: ignore[call-arg]
    for one, other in zip(expected, actual, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)
