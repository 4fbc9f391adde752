"""Operators by name: what resolves, what is refused and with which remedy."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from strategies import StrategyError
from strategies.regions.operator_names import resolve
from strategies.regions.presets import GROUPS, PRESETS

aten = torch.ops.aten

RESOLVED = {
    "exact overload": (("aten.mm.default",), {"aten.mm.default": {aten.mm.default}}),
    "as torch prints it": (("torch.ops.aten.mm.dtype",), {"torch.ops.aten.mm.dtype": {aten.mm.dtype}}),
    "higher-order operator": (
        ("higher_order.flex_attention",),
        {"higher_order.flex_attention": {torch.ops.higher_order.flex_attention}},
    ),
    "two groups": (
        ("max", "topk"),
        {"max": {aten.max.default, aten.max.dim}, "topk": {aten.topk.default}},
    ),
    "modalities is its five keys exactly": (
        "modalities",
        {
            "aten.mm.default": {aten.mm.default},
            "aten._scaled_dot_product_efficient_attention.default": {
                aten._scaled_dot_product_efficient_attention.default
            },
            "aten._scaled_dot_product_flash_attention.default": {
                aten._scaled_dot_product_flash_attention.default
            },
            "_c10d_functional.reduce_scatter_tensor.default": {
                torch.ops._c10d_functional.reduce_scatter_tensor.default
            },
            "aten.max.default": {aten.max.default},
        },
    ),
}


@pytest.mark.parametrize(("save_ops", "expected"), RESOLVED.values(), ids=RESOLVED)
def test_resolved(save_ops: Any, expected: dict[str, set[Any]]) -> None:
    assert resolve(save_ops, None).entries == expected


IN_GROUP = {
    "biased linear is addmm": ("matmul", aten.addmm.default),
    "bias-free linear is mm": ("matmul", aten.mm.default),
    "attention on CPU": ("attention", aten._scaled_dot_product_flash_attention_for_cpu.default),
    "attention on CUDA": ("attention", aten._scaled_dot_product_cudnn_attention.default),
    "flex attention": ("attention", torch.ops.higher_order.flex_attention),
    "all-to-all": ("comm", torch.ops._c10d_functional.all_to_all_single.default),
}


@pytest.mark.parametrize(("group", "operator"), IN_GROUP.values(), ids=IN_GROUP)
def test_a_group_holds(group: str, operator: Any) -> None:
    assert resolve((group,), None).entries_of(operator) == (group,)


def test_groups_do_not_overlap() -> None:
    names = [name for group in GROUPS.values() for name in group]
    assert len(names) == len(set(names))


def test_presets_recompute_as_their_projects_do() -> None:
    assert {name: resolve(name, None).recompute_every for name in PRESETS} == {
        "modalities": 2,
        "torchtitan": 2,
    }
    assert resolve("torchtitan", 0).recompute_every == 0
    assert resolve("torchtitan", None).counted == {aten.mm.default, aten.mm.dtype, aten.linear.default}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_names_each_of_its_operators(name: str) -> None:
    assert resolve(name, None).named == PRESETS[name].operators


PICKLED: dict[str, tuple[Any, int | None]] = {
    "a list of groups": (("matmul", "topk"), 3),
    "a preset": ("modalities", None),
    "a preset that counts other matmuls than the group": ("torchtitan", None),
    "a preset with its count switched off": ("torchtitan", 0),
}


@pytest.mark.parametrize(("save_ops", "every"), PICKLED.values(), ids=PICKLED)
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))], ids=["deepcopy", "pickle"]
)
def test_a_copy_is_equal(save_ops: Any, every: int | None, duplicate: Any) -> None:
    save_list = resolve(save_ops, every)
    assert duplicate(save_list) == save_list


REFUSED = {
    "empty list": (
        (),
        None,
        (
            "ac.save_ops: is empty, which is full AC; use ac=full, "
            "or name some of matmul, conv, attention, comm, max, topk"
        ),
    ),
    "misspelt group": (
        ("matmull",),
        None,
        (
            "ac.save_ops: 'matmull' is no group and no operator; did you mean 'matmul'? "
            "groups are: matmul, conv, attention, comm, max, topk; an operator is written as aten.mm.default"
        ),
    ),
    "misspelt overload": (
        ("aten.adddmm.default",),
        None,
        (
            "ac.save_ops: 'aten.adddmm.default' is no group and no operator; "
            "did you mean 'aten.addmm.default'? "
            "groups are: matmul, conv, attention, comm, max, topk; an operator is written as aten.mm.default"
        ),
    ),
    "operator packet": (
        ("aten.mm",),
        None,
        (
            "ac.save_ops: 'aten.mm' is an operator packet, which never matches; "
            "its overloads are: aten.mm.default, aten.mm.dtype"
        ),
    ),
    "operator in place": (
        ("aten.add_.Tensor",),
        None,
        (
            "ac.save_ops: 'aten.add_.Tensor' writes to its inputs, which saving would skip; "
            "name an operator that does not"
        ),
    ),
    "unknown preset": (
        "modality",
        None,
        (
            "ac.save_ops: 'modality' is no preset; presets are: modalities, torchtitan; "
            "otherwise write a list of names"
        ),
    ),
    "group without brackets": (
        "matmul",
        None,
        (
            "ac.save_ops: 'matmul' is no preset; presets are: modalities, torchtitan; "
            "otherwise write the list [matmul]"
        ),
    ),
    "every matmul recomputed": (
        ("matmul",),
        1,
        (
            "ac.matmul_recompute_every: must be 0 (never) or at least 2, got 1; "
            "to recompute every matmul use ac=full"
        ),
    ),
    "negative count": (("matmul",), -2, "ac.matmul_recompute_every: must be 0 (never) or at least 2, got -2"),
    "no matmul to count": (
        ("attention",),
        2,
        "ac.matmul_recompute_every: is 2, but ac.save_ops names no matmul; add matmul, or use 0",
    ),
}


@pytest.mark.parametrize(("save_ops", "every", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(save_ops: Any, every: int | None, message: str) -> None:
    with pytest.raises(StrategyError) as error:
        resolve(save_ops, every)
    assert str(error.value) == message
