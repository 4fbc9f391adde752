"""The plan of `ac=budget` as a value and as a file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from strategies import StrategyError
from strategies.budget.plan import BlockPlan, Drop, Plan, Value, input_value
from strategies.step.sizes import TensorSize

_BLOCK = BlockPlan(
    fqn="layers.0",
    keep=(Value(3, 0, "aten.addmm.default"),),
    offload=(input_value(0), Value(5, 0, "aten.gelu.default")),
    recompute=(Value(7, 1, "aten.native_layer_norm.default"),),
    drop=(Drop(3, 0, "aten.addmm.default", (1, 4)),),
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
    lower_bound_autograd_flops=79,
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


def changed(block: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """Return the plan with other fields, and other ones of its first block."""
    held = PLAN.to_dict()
    first, *others = held["blocks"]
    return {**held, "blocks": [{**first, **(block or {})}, *others], **fields}


CONTRADICTORY: dict[str, tuple[dict[str, Any], str]] = {
    "a budget in words": (changed(budget_bytes="many"), "budget_bytes is 'many'"),
    "a budget that is no number": (changed(budget_bytes=float("nan")), "budget_bytes is nan"),
    "fewer bytes than none": (changed(host_budget_bytes=-1), "host_budget_bytes is -1"),
    "no block": (changed(blocks=[]), "it plans for no block"),
    "a block twice": (changed(blocks=[PLAN.to_dict()["blocks"][0]] * 2), "'layers.0' more than once"),
    "a caller without operators": (changed({"caller": "model"}), "operators of a caller before its own"),
    "operators of no caller": (
        changed({"before": [["aten.embedding.default()", 0]]}),
        "operators of a caller before its own",
    ),
    "half an operator before": (
        changed({"caller": "", "before": [["a()", 0.5]]}),
        "operators of a caller before its own",
    ),
    "a group of nobody": (changed({"group": "layers.7"}), "begins with 'layers.7'"),
    "a chain of nobody": (changed({"chain": "layers.7"}), "the chain of 'layers.0' begins with 'layers.7'"),
    "nowhere to wait": (changed(host_budget_bytes=0), "'layers.0' offloads, and host_budget_bytes is 0"),
    "plain in words": (changed({"plain": "yes"}), "plain is true or false"),
    "an operator that is not there": (changed({"recompute": [[9, 0, "a"]]}), "recompute names a.0 (9)"),
    "an operator before the first": (changed({"offload": [[-2, 0, "a"]]}), "offload names a.0 (-2)"),
    "half an operator": (changed({"keep": [[1.5, 0, "a"]]}), "keep names a.0 (1.5)"),
    "a write of no operator": (changed({"offload": [[-1, -1, "input"]]}), "offload names input -1"),
    "an input that is kept": (changed({"keep": [[-1, 0, "input"]]}), "inputs can be offloaded alone"),
    "two fates": (changed({"recompute": [[3, 0, "aten.addmm.default"]]}), "(3) is in keep and in recompute"),
    "a drop of what is not there": (changed({"drop": [[9, 0, "a", [1]]]}), "drop names a.0 (9)"),
    "a drop of an input": (changed({"drop": [[-1, 0, "input", [1]]]}), "drop names input 0"),
    "a drop of what waits on the host": (
        changed({"drop": [[5, 0, "aten.gelu.default", [1]]]}),
        "(5) is in offload and in drop",
    ),
    "a drop after no request": (changed({"drop": [[3, 0, "a", []]]}), "is dropped after []"),
    "a drop before the first": (changed({"drop": [[3, 0, "a", [0, 1]]]}), "from 1 up"),
    "drops that go down": (changed({"drop": [[3, 0, "a", [2, 1]]]}), "after [2, 1], which must go up"),
    "a drop twice": (
        changed({"drop": [[3, 0, "a", [1]], [3, 0, "a", [2]]]}),
        "a.0 (3) is in drop more than once",
    ),
    "a drop of a block that stays": (changed({"plain": True}), "it drops values, and is plain"),
    "a drop in a group": (changed({"group": "layers.0"}), "is in a group"),
    "a drop in a graph": (changed({"graph": "0" * 32}), "or compiled"),
    "kept and made anew": (changed({"again": [[3, 0, "aten.addmm.default"]]}), "(3) is in keep and in again"),
}


@pytest.mark.parametrize(("held", "words"), CONTRADICTORY.values(), ids=CONTRADICTORY)
def test_what_no_planner_writes_is_refused(held: dict[str, Any], words: str) -> None:
    with pytest.raises(StrategyError, match=re.escape(words)):
        Plan.from_dict(held)


def test_a_plain_block_may_be_called_twice() -> None:
    held = PLAN.to_dict()
    held["blocks"] = [*held["blocks"], held["blocks"][-1]]
    assert len(Plan.from_dict(held).blocks) == 3


def test_a_value_that_is_recomputed_may_be_made_anew_for_each_reader() -> None:
    (value,) = _BLOCK.recompute
    assert Plan.from_dict(changed({"again": [list(value)]})).blocks[0].again == (value,)


def test_a_plan_says_what_is_dropped() -> None:
    assert "\n    drop in backward: aten.addmm.default.0 (3) after 1 and 4\n" in f"{PLAN.describe()}\n"


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
