"""`ac=budget`: values that it refuses, plan files, and what it says of a budget that needs nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from strategies import StrategyError
from strategies.ac.budget import Budget
from tests.strategies.toys import differences, toy, train_step

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "neither": (
        {},
        "ac: give exactly one of ac.budget_gib, ac.fraction, ac.plan_file, got none of them",
    ),
    "both": (
        {"budget_gib": 1.0, "fraction": 0.5},
        "ac: give exactly one of ac.budget_gib, ac.fraction, ac.plan_file, got ac.budget_gib and ac.fraction",
    ),
    "no bytes": ({"budget_gib": 0}, "ac.budget_gib: must be above 0, got 0"),
    "no number": ({"budget_gib": float("nan")}, "ac.budget_gib: must be above 0, got nan"),
    "endless": ({"budget_gib": float("inf")}, "ac.budget_gib: must be above 0, got inf"),
    "more than all": ({"fraction": 1.1}, "ac.fraction: must be above 0 and at most 1, got 1.1"),
    "less than no host": (
        {"fraction": 0.5, "host_gib": -1},
        "ac.host_gib: must be at least 0 and finite, got -1",
    ),
    "endless host": (
        {"fraction": 0.5, "host_gib": float("inf")},
        "ac.host_gib: must be at least 0 and finite, got inf",
    ),
    "another objective": (
        {"fraction": 0.5, "objective": "bytes"},
        "ac.objective: must be flops or time, got 'bytes'",
    ),
}


@pytest.mark.parametrize(("fields", "message"), REFUSED.values(), ids=REFUSED)
def test_refusal_says_what_would_be_right(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(StrategyError) as error:
        Budget(**fields)
    assert str(error.value) == message


def planned_toy(**fields: Any) -> tuple[Budget, Any]:
    budget = Budget(layers_fqn="layers", **fields)
    model = budget.apply(toy())
    train_step(model)
    return budget, model


def test_a_budget_below_the_smallest_is_refused_with_it() -> None:
    with pytest.raises(StrategyError) as error:
        planned_toy(fraction=0.1)
    smallest = str(error.value).partition("ac.fraction=")[2].partition(" ")[0]
    assert str(error.value).startswith("ac.fraction: no plan keeps ")
    _, model = planned_toy(fraction=float(smallest))
    assert differences(train_step(toy()), train_step(model)) == []


@pytest.mark.parametrize(
    ("fields", "asked_bytes", "reason"),
    [
        pytest.param({"fraction": 1.0}, None, "the step fits it as it is", id="all"),
        pytest.param(
            {"budget_gib": 10.0},
            10 << 30,
            "10737418240 bytes are above the peak without activation checkpointing, {} bytes",
            id="more than all",
        ),
    ],
)
def test_a_budget_that_needs_nothing_says_so(
    fields: dict[str, float], asked_bytes: int | None, reason: str
) -> None:
    budget, model = planned_toy(**fields)
    observed = budget.observe(model)
    assert observed.plan is not None
    plain_bytes = observed.plan["plain_peak_bytes"]
    assert observed.unneeded == f"the budget needs nothing: {reason.format(plain_bytes)}"
    assert observed.plan["budget_bytes"] == (asked_bytes or plain_bytes)
    assert observed.plan["extra_flops"] == 0
    assert type(model.layers[0]).__name__ == "Block"


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    budget, model = planned_toy(fraction=0.92)
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    file.write_text(json.dumps(budget.observe(model).plan))
    return file


def test_values_wait_on_the_host_where_it_has_room() -> None:
    budget, model = planned_toy(fraction=0.8, host_gib=0.001)
    assert differences(train_step(toy()), train_step(model)) == []
    observed = budget.observe(model)
    assert observed.plan is not None
    assert observed.plan["extra_flops"] == 0
    assert 0 < observed.offloaded_bytes == observed.plan["offloaded_bytes"] <= 0.001 * 2**30


def test_a_plan_file_is_carried_out(plan_file: Path) -> None:
    budget = Budget(layers_fqn="layers", plan_file=str(plan_file))
    model = budget.apply(toy())
    assert differences(train_step(toy()), train_step(model)) == []
    assert json.loads(json.dumps(budget.observe(model).plan)) == json.loads(plan_file.read_text())


def test_a_plan_takes_smaller_inputs_bit_for_bit_and_refuses_larger_ones(plan_file: Path) -> None:
    plain, model = toy(), Budget(layers_fqn="layers", plan_file=str(plan_file)).apply(toy())
    tokens = torch.arange(14).reshape(2, 7) % 4
    for each in (plain, model):
        torch.manual_seed(1)
        each(tokens).square().sum().backward()
    for expected, actual in zip(plain.parameters(), model.parameters(), strict=True):
        assert expected.grad is not None
        assert actual.grad is not None
        assert torch.equal(expected.grad, actual.grad)
    with pytest.raises(StrategyError) as error:
        model(torch.zeros(8, 8, dtype=torch.long))
    made_for = "was made for input 0 of (2, 8, 16), not (8, 8, 16)"
    assert str(error.value) == f"ac: the plan of 'layers.0' {made_for}; make it again for these sizes"


def test_a_model_that_planned_itself_takes_smaller_inputs_and_refuses_larger_ones() -> None:
    _, model = planned_toy(fraction=0.92)
    model(torch.zeros(2, 7, dtype=torch.long)).sum().backward()
    with pytest.raises(StrategyError, match=r"was made for input 0 of \(2, 8, 16\), not \(3, 8, 16\)"):
        model(torch.zeros(3, 8, dtype=torch.long))


_DIFFERS = "whose operators may differ; make it again"
_OWN_BUDGET = {"budget_bytes": 7, "predicted_peak_bytes": 8}
UNSUITABLE: dict[str, tuple[dict[str, Any], str]] = {
    "another torch": (
        {"versions": {"torch": "1.0"}},
        f"ac.plan_file: was made with torch 1.0, and this is {torch.__version__}, {_DIFFERS}",
    ),
    "a budget below its peak": (
        _OWN_BUDGET,
        "ac.plan_file: was made for a peak of 8 bytes, above its budget_bytes of 7; make it again",
    ),
    "another format": (
        {"format": "0"},
        "ac.plan_file: holds no plan of this version, 'acbench budget plan 3'; make it again",
    ),
}


@pytest.mark.parametrize(("changes", "message"), UNSUITABLE.values(), ids=UNSUITABLE)
def test_refusal_of_a_plan_file(
    plan_file: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps(json.loads(plan_file.read_text()) | changes))
    with pytest.raises(StrategyError) as error:
        Budget(layers_fqn="layers", plan_file=str(other)).apply(toy())
    assert str(error.value) == message


def test_refusal_of_the_plan_of_another_model(plan_file: Path) -> None:
    model = toy()
    model.blocks = model.layers[:2]
    with pytest.raises(StrategyError) as error:
        Budget(layers_fqn="blocks", plan_file=str(plan_file)).apply(model)
    assert str(error.value) == (
        "ac.plan_file: plans 'layers.0', and the blocks of this model are blocks.0, blocks.1; use a plan of "
        "this model"
    )


def test_refusal_of_a_file_that_is_not_there() -> None:
    with pytest.raises(StrategyError) as error:
        Budget(layers_fqn="layers", plan_file="missing.json").apply(toy())
    assert str(error.value) == "ac.plan_file: 'missing.json' cannot be read: No such file or directory"


def test_refusal_of_call_sites_and_compilers() -> None:
    budget = Budget(fraction=0.5)
    with pytest.raises(StrategyError, match=r"^wrap_order: call_site makes the model one region"):
        budget.call_site(toy())
    with pytest.raises(
        StrategyError, match=r"^compile: ac=budget follows the operators of eager blocks; use"
    ):
        budget.check_compilation("ac_first", "blocks")


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.dropout, self.down = nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = x + self.down(self.dropout(self.up(x).sin()).cos())
        return outputs


def test_evaluation_with_gradients_runs_the_plain_blocks() -> None:
    found = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Sequential(*(Dropping() for _ in range(3))))
        x = torch.randn(64, 8)
        if is_planned:
            model = Budget(fraction=0.8, layers_fqn="0").apply(model)
        for is_training in (True, False, True):
            model.train(is_training)
            model(x).sum().backward()
        found.append([*(each.grad for each in model.parameters()), torch.get_rng_state()])
    assert all(map(torch.equal, *found))
