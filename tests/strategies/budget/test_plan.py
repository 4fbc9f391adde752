"""The plan of `ac=budget` as a value and as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strategies import StrategyError
from strategies.budget.plan import BlockPlan, Plan, TensorSize, Value, input_value

_BLOCK = BlockPlan(
    fqn="layers.0",
    keep=(Value(3, 0, "aten.addmm.default"),),
    offload=(input_value(0), Value(5, 0, "aten.gelu.default")),
    recompute=(Value(7, 1, "aten.native_layer_norm.default"),),
    operators=9,
    sizes=(TensorSize("input 0", (2, 3), "float32 on cpu"),),
)
PLAN = Plan(
    budget_bytes=100,
    host_budget_bytes=80,
    offloaded_bytes=70,
    predicted_peak_bytes=99,
    plain_peak_bytes=200,
    minimum_feasible_bytes=60,
    proven_minimum_bytes=50,
    step_flops=1000,
    extra_flops=80,
    lower_bound_extra_flops=76,
    model={"blocks": {"layers.0": "9 operators"}},
    versions={"torch": "2.13.0"},
    blocks=(_BLOCK, BlockPlan(fqn="layers.1", plain=True)),
)


def test_a_plan_is_the_same_after_it_was_a_file(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("not JSON", id="a file of something else"),
        pytest.param("[]", id="a list"),
        pytest.param('{"format": "acbench budget plan 0"}', id="another format"),
        pytest.param('{"format": "acbench budget plan 4"}', id="a plan without its fields"),
    ],
)
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text, encoding="utf-8")
    with pytest.raises(StrategyError, match=r"^ac\.plan_file: holds no plan of this version"):
        Plan.load(tmp_path / "plan.json")


def test_a_plan_says_what_waits_on_the_host() -> None:
    text = PLAN.describe()
    assert (
        "; 0.000 MiB of 0.000 MiB wait on the host; no schedule of these operators keeps both budgets with"
        in text
    )
    assert "\n    offload: input 0, aten.gelu.default.0 (5)\n" in text


def test_a_plan_of_untouched_blocks_is_plain() -> None:
    held: dict[str, Any] = PLAN.to_dict()
    held["blocks"] = held["blocks"][1:]
    assert [PLAN.is_plain, Plan.from_dict(held).is_plain] == [False, True]
