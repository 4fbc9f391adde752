"""The parity matrix: every variant, on every model and mesh, with and without dropout, is bitwise neutral."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.experiment.experiment import Experiment
from harness.experiment.mesh import Mesh
from strategies import eager_variants
from strategies.ac.selective_op import SelectiveOp
from tests.covering import marked, matrix
from tests.parity import cases
from tests.rank_pool import RankPool

_DROPOUTS = (0.1, 0.0)
_TWO_RANKS = ("ddp2", "shard2", "tp2")
_FOUR_RANKS = ("shard2_tp2", "hsdp2x2")
_STEPS = 2
"""The second begins with what the first leaves: an update, buckets, orders, random numbers."""
_FEED_FORWARD = ("feed_forward_norm", "feed_forward.up", "feed_forward.down")
_INSIDE_BLOCKS = {
    "layers.0.attention_norm": [0, 0],
    "layers.0.attention": [0, 0],
    "layers.0.dropout": [0],
    **{f"layers.0.{name}": [0, 1] for name in _FEED_FORWARD},
    "layers.1": 1,
}


_OF_EVERY_KIND = [
    variant
    for variant in eager_variants
    if variant not in {"none", "selective_layer", "offload", "torch_remat"}
]
"""What recomputes, saves by operator and records; the others do not depend on what is in a block."""
_DEAR = {"budget": ("moe", "evoformer", "unet")}
"""Models whose blocks have so many operators that their plans take longer than the proof."""


_DEAR_MESHES = {"budget": ("shard2_tp2", "ddp2_tp2")}
"""Meshes on which only an mlp is cheap: each mesh has a plan of its own."""


def _is_cheap(row: tuple[Any, ...]) -> bool:
    variant, model, mesh, _, dtype = row
    if model != "mlp" and mesh in _DEAR_MESHES.get(variant, ()):
        return False
    return model not in _DEAR.get(variant, ()) and (variant, dtype) != ("budget", "bf16_mixed")


_ROWS = [
    *product(eager_variants, cases.MODELS, ["single", *_TWO_RANKS, *_FOUR_RANKS], _DROPOUTS, ["fp32"]),
    *product(_OF_EVERY_KIND, cases.OF_SAMPLES, ["shard2"], [0.1], ["fp32"]),
    *product(["full"], cases.OF_SAMPLES, ["ddp2"], [0.1], ["fp32"]),
    *product(eager_variants, ["gpt"], ["ddp2_tp2"], [0.1], ["fp32"]),
    *product(eager_variants, ["gpt"], ["ddp2", "shard2"], [0.1], ["bf16", "bf16_mixed"]),
]
_NEUTRAL = [row for row in _ROWS if _is_cheap(row)]


def _case(**fields: Any) -> Experiment:
    return cases.experiment(**{"parity_steps": _STEPS, **fields})


_ONLY_IN_THE_MATRIX = [
    *(row for row in _ROWS if not _is_cheap(row)),
    *(
        row
        for row in product(eager_variants, cases.OF_SAMPLES, ["shard2"], [0.1], ["fp32"])
        if row[0] not in _OF_EVERY_KIND
    ),
]


@pytest.mark.parametrize(
    ("variant", "model", "mesh", "dropout", "dtype"), [*matrix(_NEUTRAL), *marked(_ONLY_IN_THE_MATRIX, [])]
)
def test_is_bitwise_neutral(
    unequal_ranks: Callable[[Experiment], dict[int, list[str]]],
    variant: str,
    model: str,
    mesh: str,
    dropout: float,
    dtype: str,
) -> None:
    # with two samples a rank the peak of an mlp lies in the optimizer, which no plan lowers
    batch_size = 8 if (variant, model, mesh) == ("budget", "mlp", "ddp2") else 4
    case = _case(
        variant=variant, model=model, mesh=cases.MESHES[mesh], dropout=dropout, dtype=dtype,
        batch_size=batch_size,
    )  # fmt: skip
    assert unequal_ranks(case) == {}


_OPTIONS: dict[str, tuple[str, dict[str, object]]] = {
    "full without early stop": ("full", {"early_stop": False}),
    "full, reentrant": ("full", {"use_reentrant": True}),
    "full with its inputs on the host": ("full", {"offload": True}),
    "selective layer of every layer": ("selective_layer", {"ac_freq": 1}),
    "full with its state put back": ("full", {"rewind": True}),
    "matmuls and collectives": ("selective_op", {"save_ops": ("matmul", "comm")}),
    "full by class name": ("full", {"module_classes": ("GPTBlock",)}),
    "regions that are recomputed and offloaded": (
        "nested",
        {"levels": [1, 2], "offload": {"inputs": [0], "all": [[0, 1]]}, "keep": [[0, 1]]},
    ),
    "torchtitan's save list": ("selective_op", {"save_ops": "torchtitan"}),
    "every second matmul": ("selective_op", {"matmul_recompute_every": 2}),
    "regions inside a block and around it": ("nested", {"labels": _INSIDE_BLOCKS}),
    "three levels of regions": ("nested", {"levels": [1, 1, 2], "early_stop": False}),
    "modalities' save list": ("selective_op", {"save_ops": "modalities"}),
    "a budget with values on the host": ("budget", {"fraction": 0.9, "host_gib": 1.0}),
    "names of modules and operators": (
        "modules",
        {"discard": ["*norm", "::aten.gelu*"], "recompute": ["feed_forward"], "offload": ["attention"]},
    ),
    "what names keep": ("modules", {"keep": ["attention", "*::aten.*mm*"]}),
    "labels of Megatron": ("megatron", {"modules": ["core_attn", "layernorm", "mlp"]}),
}
"""In an order that takes what saves collectives to `tp2` and what holds parameters to `shard2`."""
_MESH_OF_OPTION = [*zip(_OPTIONS, cycle(_TWO_RANKS), strict=False)]
"""Which runs by default; every variant is on every mesh in `_NEUTRAL`."""


@pytest.mark.parametrize(("option", "mesh"), marked([*product(_OPTIONS, _TWO_RANKS)], _MESH_OF_OPTION))
def test_every_option_is_bitwise_neutral(pool2: RankPool, option: str, mesh: str) -> None:
    variant, options = _OPTIONS[option]
    case = _case(variant=variant, options=options, mesh=cases.MESHES[mesh], dropout=0.1)
    assert pool2.run(cases.prove, case) == [[], []]


_LABELS = {
    "llama": ("core_attn", "layernorm", "mlp"),
    "moe": ("core_attn", "layernorm", "moe_act"),
    "hf_qwen3": ("core_attn", "layernorm", "mlp"),
}
_LABELLED = [
    *product(_LABELS, ["single", *_TWO_RANKS, *_FOUR_RANKS], ["fp32"]),
    ("moe", "shard2", "bf16_mixed"),
]


@pytest.mark.parametrize(
    ("model", "mesh", "dtype"),
    marked(_LABELLED, [("moe", "shard2", "fp32"), ("llama", "single", "fp32"), ("hf_qwen3", "tp2", "fp32")]),
)
def test_labels_of_megatron_are_bitwise_neutral(
    unequal_ranks: Callable[[Experiment], dict[int, list[str]]], model: str, mesh: str, dtype: str
) -> None:
    case = _case(
        variant="megatron",
        options={"modules": _LABELS[model]},
        model=model,
        mesh=cases.MESHES[mesh],
        dropout=0.1,
        dtype=dtype,
    )
    assert unequal_ranks(case) == {}


@pytest.mark.parametrize(
    ("model", "mesh"), [("gpt", "ddp2"), ("llama", "shard2"), ("moe", "tp2"), ("gpt", "tp2")]
)
def test_a_written_file_is_bitwise_neutral(pool2: RankPool, tmp_path: Path, model: str, mesh: str) -> None:
    with torch.random.fork_rng():
        plain = cases.MODELS[model].build()
    text = SelectiveOp(layers_fqn="layers").view("file", plain, (torch.zeros(4, 16, dtype=torch.int64),))
    path = tmp_path / "apply_ac.py"
    path.write_text(text, encoding="utf-8")
    case = _case(
        model=model, variant="file", options={"path": str(path)}, mesh=cases.MESHES[mesh], dropout=0.1
    )
    assert pool2.run(cases.prove, case) == [[], []]


_FSDP1 = Mesh(dp_shard=2, device="cpu", fsdp="fsdp1", use_orig_params=True)
_WAITING = {
    "bf16_mixed": (cases.MESHES["shard2"], {"dtype": "bf16_mixed"}),
    "fsdp1": (_FSDP1, {}),
    "fsdp1 of flat parameters": (replace(_FSDP1, use_orig_params=False), {}),
    "fsdp1, bf16_mixed": (_FSDP1, {"dtype": "bf16_mixed"}),
    "fsdp1 inside": (_FSDP1, {"wrap_order": "outside_fsdp"}),
}


@pytest.mark.parametrize(("mesh", "recipe"), _WAITING.values(), ids=_WAITING)
def test_a_budget_with_values_on_the_host_is_bitwise_neutral(
    pool2: RankPool, mesh: Mesh, recipe: dict[str, Any]
) -> None:
    options = {"fraction": 0.9, "host_gib": 1.0}
    case = _case(variant="budget", options=options, mesh=mesh, dropout=0.1, **recipe)
    assert pool2.run(cases.prove, case) == [[], []]


@pytest.mark.parametrize("wrap_order", ["inside_fsdp", "outside_fsdp"])
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_fsdp1_lends_weights_that_are_not_put_back(
    pool2: RankPool, wrap_order: str, use_orig_params: bool
) -> None:
    mesh = Mesh(dp_shard=2, device="cpu", fsdp="fsdp1", use_orig_params=use_orig_params)
    case = _case(variant="full", options={"rewind": True}, mesh=mesh, wrap_order=wrap_order, parity_steps=1)
    assert pool2.run(cases.prove, case) == [[], []]


@pytest.mark.parametrize("mesh", ["ddp2", "tp2"])
def test_a_region_from_one_block_into_the_next_is_bitwise_neutral(pool2: RankPool, mesh: str) -> None:
    labels = dict.fromkeys(
        [f"layers.0.{name}" for name in ("feed_forward_norm", "feed_forward", "dropout")]
        + ["layers.1.attention_norm"],
        0,
    )
    case = _case(variant="nested", options={"labels": labels}, mesh=cases.MESHES[mesh], dropout=0.1)
    assert pool2.run(cases.prove, case) == [[], []]


@pytest.mark.parametrize("mesh", ["single", "shard2", "tp2"])
def test_a_dropped_generator_state_is_seen_on_every_rank(pool2: RankPool, mesh: str) -> None:
    case = _case(options={"preserve_rng_state": False}, mesh=cases.MESHES[mesh], dropout=0.1, parity_steps=1)
    ranks = pool2.run(cases.prove, case) if case.mesh.world_size > 1 else [cases.prove(0, case)]
    for rank, found in enumerate(ranks):
        assert found[0].startswith("parity: gradient of "), found
        assert f"on rank {rank}" in found[0]
