"""Exports of plans: what others run of them computes the same, and holds what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from strategies import StrategyError
from strategies.ac.budget import Budget
from strategies.budget.export import operator_saves, policy_file, remat_regions
from strategies.budget.first_call import shadow_step
from strategies.budget.operator_modules import BlockForward, block_forwards
from strategies.budget.plan import BlockPlan, Plan, Value, input_value
from tests.strategies.meters import Meter
from tests.strategies.toys import BATCH, SEQUENCE, differences, toy, train_step

TOKENS = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)


@cache
def planned(fraction: float) -> tuple[Plan, dict[str, BlockForward]]:
    with torch.device("meta"):
        step = shadow_step(toy(), (TOKENS,), {})
    budget = Budget(layers_fqn="layers", fraction=fraction)
    return budget.plan(step), block_forwards(step, budget.blocks_of(step.model))


def carried_out(text: str) -> dict[str, Any]:
    """Return the names of a policy file, which has run."""
    names: dict[str, Any] = {}
    exec(text, names)
    return names


def held_bytes(model: nn.Module) -> int:
    with Meter(TOKENS, *model.parameters(), *model.buffers()) as meter:
        outputs = model(TOKENS)
    assert outputs.requires_grad
    alive_bytes: int = meter.alive_bytes(on_host=False)
    return alive_bytes


def test_a_policy_file_computes_the_same_and_holds_what_it_says() -> None:
    plan, forwards = planned(0.82)
    text = policy_file(plan, forwards)
    assert [line for line in text.splitlines() if "import" in line and "acbench" in line] == []
    names = carried_out(text)
    model = names["apply"](toy())
    assert differences(train_step(toy()), train_step(model)) == []
    found = held_bytes(model)
    names["SAVES"].update({fqn: {} for fqn in names["SAVES"]})
    # three masks of dropout are written in place, and one layer norm has its output beside its statistics
    assert "# lost: aten.empty_like.default.0 (17), aten.empty_like.default.0 (28), aten" in text
    kept_bytes = sum(block.kept_bytes for block in plan.blocks)
    assert found - held_bytes(model) == kept_bytes - 3 * 3 * 1024 + 1024 == 30848


def test_a_policy_file_refuses_other_operators() -> None:
    plan, forwards = planned(0.82)
    model = carried_out(policy_file(plan, forwards))["apply"](toy("bias_free"))
    with pytest.raises(
        RuntimeError, match=r"^layers\.0: operator 9 is aten\.mul\.Scalar, planned was aten\.clone"
    ):
        model(TOKENS)


def test_a_plain_plan_leaves_every_block_as_it_is() -> None:
    plan, forwards = planned(1.0)
    assert "\nSAVES = {}\n" in policy_file(plan, forwards)
    assert (operator_saves(plan, forwards), remat_regions(plan, forwards)) == ("", "")


def test_saves_name_modules_and_operators() -> None:
    assert operator_saves(*planned(0.82)).splitlines()[:3] == [
        "# left as they are, though the plan recomputes values of them: what runs before layers.0",
        "layers.0::aten.clone.default  # 3 of 4 calls",
        "layers.0.up::aten.addmm.default",
    ]


def test_regions_are_submodules_whose_results_are_held() -> None:
    text = remat_regions(*planned(0.82))
    assert yaml.safe_load(text) == {"layers.0": ["up"], "layers.1": ["out", "up"], "layers.2": ["up"]}
    assert "\n# lost: aten.clone.default.0 (9), " in text


def by_hand(*kept: int) -> BlockPlan:
    return BlockPlan(fqn="b", keep=tuple(Value(number, 0, f"op{number}") for number in kept), operators=5)


def forward_by_hand(**fields: Any) -> dict[str, BlockForward]:
    modules = ["", "mlp.up", "mlp", "mlp.down", ""]
    return {"b": BlockForward(operators=[f"op{number}" for number in range(5)], modules=modules, **fields)}


def plan_by_hand(*blocks: BlockPlan) -> Plan:
    plan, _ = planned(1.0)
    held = {**plan.to_dict(), "host_budget_bytes": 1}
    return Plan.from_dict({**held, "blocks": [tuple_free(block) for block in blocks]})


def tuple_free(block: BlockPlan) -> dict[str, Any]:
    return {name: getattr(block, name) for name in BlockPlan.__slots__}


SAVED: dict[str, tuple[tuple[int, ...], dict[str, Any], list[int]]] = {
    "as planned": ((0, 3), {}, [0, 3]),
    "but for what is written later": ((0, 3), {"written": {(0, 0)}}, [3]),
    "and what draws later": ((1,), {"draws": {0: False, 1: False, 4: False}}, [1, 4]),
    "and nothing random where a later draw is in place": ((1, 3), {"draws": {1: False, 4: True}}, [3]),
    "nor where one is written later": ((1, 3), {"draws": {1: False, 4: False}, "written": {(4, 0)}}, [3]),
}


@pytest.mark.parametrize(("kept", "fields", "saved"), SAVED.values(), ids=SAVED)
def test_saved_operators(kept: tuple[int, ...], fields: dict[str, Any], saved: list[int]) -> None:
    text = policy_file(plan_by_hand(by_hand(*kept)), forward_by_hand(**fields))
    assert list(carried_out(text)["SAVES"]["b"]) == saved


@pytest.mark.parametrize("export", [policy_file, operator_saves, remat_regions])
def test_exports_say_what_they_do_not_offload(
    export: Callable[[Plan, dict[str, BlockForward]], str],
) -> None:
    block = replace(by_hand(1), offload=(input_value(0), Value(3, 0, "op3")))
    text = export(plan_by_hand(block), forward_by_hand())
    assert "# not offloaded: input 0, op3.0 (3)\n" in text


REGIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], list[str]]] = {
    "the outermost": ((1, 3), (), ["mlp"]),
    "not around what runs again": ((1, 3), (2,), ["mlp.up", "mlp.down"]),
    "none where results are not held": ((0,), (), []),
}


@pytest.mark.parametrize(("kept", "again", "regions"), REGIONS.values(), ids=REGIONS)
def test_regions(kept: tuple[int, ...], again: tuple[int, ...], regions: list[str]) -> None:
    block = by_hand(*kept)
    block = BlockPlan(fqn="b", keep=block.keep, recompute=by_hand(*again).keep, operators=5)
    results = {"mlp.up": {(1, 0)}, "mlp.down": {(3, 0)}, "mlp": {(3, 0)}}
    text = remat_regions(plan_by_hand(block), forward_by_hand(results=results))
    assert yaml.safe_load(text) == {"b": regions}


REFUSED: dict[str, tuple[BlockPlan, str]] = {
    "another number": (
        BlockPlan(fqn="b", operators=6),
        "show: 'b' runs 5 operators, and the plan has 6; export a plan of mesh=single without autocast",
    ),
    "another operator": (
        BlockPlan(fqn="b", operators=5, keep=(Value(1, 0, "op2"),)),
        "show: operator 1 of 'b' is op1, and the plan has op2; export a plan of mesh=single without autocast",
    ),
}


@pytest.mark.parametrize("export", [policy_file, operator_saves, remat_regions])
@pytest.mark.parametrize(("block", "message"), REFUSED.values(), ids=REFUSED)
def test_refusal_of_another_forward(
    block: BlockPlan, message: str, export: Callable[[Plan, dict[str, BlockForward]], str]
) -> None:
    with pytest.raises(StrategyError) as error:
        export(plan_by_hand(block), forward_by_hand())
    assert str(error.value) == message
