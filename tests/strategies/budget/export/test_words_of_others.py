"""Exports of plans: what others run of them computes the same, and holds what it says."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from strategies import StrategyError
from strategies.ac.budget import Budget
from strategies.ac.file import File
from strategies.budget.eager.first_call import shadow_step
from strategies.budget.export.operator_modules import BlockForward, block_forwards
from strategies.budget.export.words_of_others import plan_file, remat_regions
from strategies.budget.plan import BlockPlan, Plan, Value, input_value
from tests.strategies.installed import ABSENT
from tests.strategies.meters import measure
from tests.strategies.toys import BATCH, SEQUENCE, differences, toy, train_step
from tests.strategies.written.written_toys import loaded

REMAT = pytest.mark.skipif(
    "torch_remat" in ABSENT, reason="torch-remat is not installed: pip install 'acbench[remat]'"
)
TOKENS = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)


@cache
def planned(fraction: float) -> tuple[Plan, dict[str, BlockForward]]:
    with torch.device("meta"):
        step = shadow_step(toy(), (TOKENS,), {})
    budget = Budget(layers_fqn="layers", fraction=fraction, objective="flops")
    return budget.plan(step), block_forwards(step, budget.blocks_of(step.model))


def test_a_file_computes_the_same_and_keeps_what_the_plan_does_not_run_again() -> None:
    text = plan_file(*planned(0.82))
    names = loaded(text, "apply_budget")
    assert [(blocks, again) for blocks, _, again in names["RULES"]] == [
        (["layers.0", "layers.1", "layers.2"], [":attention"]),
    ]
    model = names["apply"](toy())
    assert differences(train_step(toy()), train_step(model)) == []


def test_a_file_says_what_it_does_otherwise() -> None:
    text = plan_file(*planned(0.82))
    assert text.startswith('"""A plan of ac=budget for 0.089 MiB a step, as rules of operators.\n\n')
    assert (
        "acbench carries the plan out within 0.088 MiB, at 2.10 % more FLOPs. "
        "Here a block runs again at once, at 1.26 %, so the peak is another one: "
        "ac=file ac.path=... measures it. Left as they are, though the plan recomputes values of them: "
        "what runs before layers.0."
    ) in words(text)


def words(text: str) -> str:
    return " ".join(text.split())


def test_a_plain_plan_leaves_every_block_as_it_is() -> None:
    plan, forwards = planned(1.0)
    assert loaded(plan_file(plan, forwards))["RULES"] == []
    assert remat_regions(plan, forwards) == ""


def test_regions_are_submodules_whose_results_are_held() -> None:
    text = remat_regions(*planned(0.92))
    assert yaml.safe_load(text) == {"layers.0": ["norm", "up"], "layers.1": ["norm", "up"]}
    lost = re.sub(r" \(\d+\)", "", text)  # numbers of operators differ between releases of torch
    assert "\n# lost: aten.clone.default.0, aten.clone.default.0, aten._safe_softmax.default.0, " in lost


@REMAT
@pytest.mark.parametrize(("export", "name"), [(plan_file, "plan.py"), (remat_regions, "plan.yaml")])
def test_what_is_written_is_read(
    export: Callable[[Plan, dict[str, BlockForward]], str], name: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(export(*planned(0.82)), encoding="utf-8")
    model = File(path=str(path), layers_fqn="layers").apply(toy())
    assert differences(train_step(toy()), train_step(model)) == []
    assert measure(model, TOKENS).saved_bytes < measure(toy(), TOKENS).saved_bytes


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


@pytest.mark.parametrize(
    ("export", "remark"), [(plan_file, "Not offloaded"), (remat_regions, "# not offloaded")]
)
def test_exports_say_what_they_do_not_offload(
    export: Callable[[Plan, dict[str, BlockForward]], str], remark: str
) -> None:
    block = replace(by_hand(1), offload=(input_value(0), Value(3, 0, "op3")))
    assert f"{remark}: input 0, op3.0 (3)" in words(export(plan_by_hand(block), forward_by_hand()))


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


@pytest.mark.parametrize("export", [plan_file, remat_regions])
@pytest.mark.parametrize(("block", "message"), REFUSED.values(), ids=REFUSED)
def test_refusal_of_another_forward(
    block: BlockPlan, message: str, export: Callable[[Plan, dict[str, BlockForward]], str]
) -> None:
    with pytest.raises(StrategyError) as error:
        export(plan_by_hand(block), forward_by_hand())
    assert str(error.value) == message
