# ruff: noqa: E501 (one line a message)
from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from harness.errors import ConfigError
from harness.experiment.experiment import Experiment, Recipe, name_of
from harness.records.store import trial_id
from strategies import ac_variants, shard_variants
from strategies.foreign import variant
from strategies.written.loaded_file import digest_of
from tests.harness.composing import experiment_of, point_of, refusal_of, rows
from tests.strategies.installed import ABSENT

GROUPS = ["model", "mesh", "ac", "chunk", "shard", "data", "protocol"]
FREED = (
    "ac.use_reentrant: true inside a sharded FSDP1 unit reads weights that the unit frees after its first "
    "backward; use ac.use_reentrant=false, wrap_order=outside_fsdp or mesh.sharding_strategy=NO_SHARD"
)


def test_the_twin_differs_in_the_strategies_alone() -> None:
    experiment = experiment_of("ac=full mesh=shard2 model.dropout=0.1 seed=3")
    twin = experiment.twin()
    changed = {
        field.name
        for field in dataclasses.fields(Experiment)
        if getattr(twin, field.name) != getattr(experiment, field.name)
    }
    assert changed == {"ac"}
    assert twin.twin() == twin


@pytest.mark.parametrize(
    ("line", "changed", "is_placed_as_twin"),
    [
        pytest.param("shard=none", set(), True, id="nothing"),
        pytest.param(
            "shard=megatron", {"shard"}, False, id="sharding alone is proven against the mesh's own"
        ),
        pytest.param("shard=megatron ac=full", {"ac"}, True, id="AC against the same sharding without it"),
    ],
)
def test_the_twin_lacks_one_thing_at_a_time(line: str, changed: set[str], is_placed_as_twin: bool) -> None:
    experiment = experiment_of(f"mesh=tp2 {line}")
    twin = experiment.twin()
    assert {name for name in GROUPS if getattr(twin, name) != getattr(experiment, name)} == changed
    assert experiment.is_placed_as_twin == is_placed_as_twin


@pytest.mark.parametrize(
    ("line", "relative"),
    [
        pytest.param("shard=cheapest", 1e-3, id="sharding"),
        pytest.param("shard=cheapest dtype=bf16", 1e-1, id="sharding in half precision"),
        pytest.param("shard=cheapest ac=full", None, id="AC is bitwise, however a model is sharded"),
        pytest.param("shard=none", None, id="nothing"),
    ],
)
def test_the_tolerance_is_of_what_lies_between_variant_and_twin(line: str, relative: float | None) -> None:
    tolerance = experiment_of(f"mesh=tp2 {line}").tolerance
    assert (tolerance and tolerance.relative) == relative


@pytest.mark.parametrize("variant", [name for name in shard_variants if name != "none"])
def test_refuses_to_shard_over_one_rank(variant: str) -> None:
    assert refusal_of(f"mesh=shard2 shard={variant}") == (
        f"mesh.tp: must be above 1 for shard={variant}, which shards over its ranks, got 1; "
        "use mesh=tp2 or shard=none"
    )


_NO_PLAN = "has no plan for it; use false"


@pytest.mark.parametrize(
    ("line", "refusal"),
    [
        pytest.param(
            "mesh=sp_tp2 sequence_length=15",
            "sequence_length: must be a multiple of mesh.tp, 2, got 15; use 14 or 16, or mesh.sp=false",
            id="a length that ranks cannot share",
        ),
        pytest.param(
            "mesh=cp2 model=llama_nano sequence_length=127",
            "sequence_length: must be a multiple of mesh.cp, 2, got 127; use 126 or 128, or "
            "mesh.cp=1 without its options",
            id="a length that parts cannot share",
        ),
        pytest.param(
            "mesh=cp2 mesh.cp=4 mesh.cp_method=ulysses model=llama_nano",
            "mesh.cp: must divide model.n_kv_heads, 2, with mesh.cp_method=ulysses, got 4; use "
            "mesh.cp_method=gather or ring",
            id="heads that ranks cannot share",
        ),
        pytest.param(
            "mesh=pp2 mesh.cp=2 microbatches=2 model=vit_nano",
            "mesh.cp: mesh.pp=2 cuts the model into stages, and 'vit_nano' cuts sequences inside of the first; "
            "use mesh.cp=1 or mesh.pp=1, each without its options",
            id="parts of images in stages",
        ),
        pytest.param(
            "mesh=pp2 mesh.cp=2 microbatches=2 model=llama_nano ac=budget ac.fraction=0.9",
            "mesh.cp: mesh.pp=2 cuts the model into stages, and ac=budget plans them for whole sequences; use "
            "mesh.cp=1 or mesh.pp=1, each without its options",
            id="plans of parts in stages",
        ),
        pytest.param(
            "mesh=pp2 mesh.cp=2 mesh.pp_schedule=zbv microbatches=2 model=llama_nano",
            "mesh.reshard_after_forward: true does not suit zbv: torch looks for the weights of a backward in "
            "two parts among those that FSDP has freed, and loses their gradients; ranks of mesh.cp=2 share "
            "weights by FSDP here; use false, or "
            "mesh.pp_split_backward=false or mesh.pp_schedule=1f1b",
            id="parts under a backward in two parts",
        ),
        pytest.param(
            "mesh=cp2 model=mlp",
            "mesh.cp: model 'mlp' has no attention over parts of a sequence, got 2; use 1 without its options, or "
            "model=llama_nano, for example",
            id="patches that nobody cuts",
        ),
        pytest.param(
            "mesh=cp2 model=llama_nano chunk=minimum",
            "mesh.cp: must be 1 for chunk=minimum, which plans operators and no collectives between them, "
            "got 2; use chunk=none",
            id="chunks",
        ),
        pytest.param(
            "mesh=cp2 model=llama_nano compile=aot_eager",
            "mesh.cp: runs eagerly alone, got compile=aot_eager; use compile=none",
            id="a compiled ring",
        ),
        pytest.param(
            "mesh=ep2 model=llama_nano",
            "mesh.ep: model 'llama_nano' has no experts that ranks could share, got 2; use 1 without its options, or "
            "model=moe_nano, for example",
            id="no experts",
        ),
        pytest.param(
            "mesh=ep2 model=moe_nano model.n_experts=5",
            "mesh.ep: must divide model.n_experts, 5, got 2; use a divisor, or model.n_experts=6",
            id="experts that ranks cannot share",
        ),
        pytest.param(
            "mesh=ep2 model=moe_nano chunk=minimum",
            "chunk: must be none for mesh.ep=2, which exchanges tokens between operators, got minimum",
            id="chunks of exchanged tokens",
        ),
        pytest.param(
            "mesh=ep2 model=moe_nano ac=budget ac.fraction=0.9",
            "mesh.ep_capacity: null does not suit ac=budget, which plans sizes of one step: those of experts "
            "without a capacity change with each; set one, or use ac=full or selective_op",
            id="a plan of other sizes",
        ),
        pytest.param(
            "mesh=cp2 mesh.ep=2 model=moe_nano ac=budget ac.fraction=0.9",
            "mesh.ep_capacity: null does not suit ac=budget, which plans sizes of one step: those of experts "
            "without a capacity change with each; use ac=full or selective_op",
            id="a plan of other sizes, where parts take no capacity",
        ),
        pytest.param(
            "mesh=ep2 mesh.ep_capacity=1.25 mesh.pp=2 mesh.reshard_after_forward=false microbatches=2 "
            "model=moe_nano ac=budget ac.fraction=0.9",
            "mesh.ep: mesh.pp=2 cuts the model into stages, and no plan of ac=budget was proven with experts in "
            "them; use mesh.ep=1 or mesh.pp=1, each without its options",
            id="a plan of experts in stages",
        ),
        pytest.param(
            "mesh=ep2 model=moe_nano compile=aot_eager",
            "mesh.ep: runs eagerly alone, got compile=aot_eager; use compile=none",
            id="a compiled exchange",
        ),
        pytest.param("mesh=sp_tp2 model=vit_nano", f"mesh.sp: model 'vit_nano' {_NO_PLAN}", id="patches"),
        pytest.param(
            "mesh=tp2 mesh.loss_parallel=true model=mlp",
            f"mesh.loss_parallel: model 'mlp' {_NO_PLAN}",
            id="a loss without plan",
        ),
        pytest.param(
            "mesh=sp_tp2 model=moe_nano",
            "mesh.sp: model 'moe_nano' has no plan for it: its routers read whole sequences; use false",
            id="routers",
        ),
        pytest.param(
            "mesh=tp2 mesh.loss_parallel=true model=gpt_nano",
            "mesh.loss_parallel: needs a head with a weight of its own, and model 'gpt_nano' has the "
            "embedding's; use false",
            id="a tied head",
        ),
        pytest.param(
            "mesh=tp2 mesh.loss_parallel=true model=llama_nano model.vocab_size=257",
            "mesh.tp: must divide model.vocab_size, 257, got 2",
            id="a vocabulary that ranks cannot share",
        ),
        pytest.param(
            "mesh=sp_tp2 model=llama_nano shard=megatron",
            "mesh.sp: is part of the mesh's own plan, and shard=megatron makes another; use shard=none",
            id="two plans",
        ),
        pytest.param(
            "mesh=sp_tp2 model=llama_nano compile=aot_eager",
            "mesh.sp: runs eagerly alone, got compile=aot_eager; use compile=none",
            id="a compiler",
        ),
    ],
)
def test_refuses_parts_of_what_is_whole(line: str, refusal: str) -> None:
    assert refusal_of(line) == refusal


_RING_OF_STAGES = "model=llama_nano mesh=cp2 mesh.cp_method=ring mesh.pp=2 microbatches=2"
_SHARDS = "model=moe_nano mesh=ep2 mesh.reshard_after_forward=false microbatches=2"
_BUDGET = "ac=budget ac.fraction=0.9"


@pytest.mark.parametrize(
    ("refused", "remedies", "followed"),
    [
        pytest.param(
            f"{_SHARDS} mesh.ep_capacity=1.25 mesh.pp=2 {_BUDGET}",
            "use mesh.ep=1 or mesh.pp=1, each without its options",
            [
                f"{_SHARDS} mesh.ep=1 mesh.pp=2 {_BUDGET}",
                f"{_SHARDS} mesh.ep_capacity=1.25 {_BUDGET}",
            ],
            id="a plan of experts in stages",
        ),
        pytest.param(
            f"{_RING_OF_STAGES} {_BUDGET}",
            "use mesh.cp=1 or mesh.pp=1, each without its options",
            [
                f"model=llama_nano mesh=cp2 mesh.cp=1 mesh.pp=2 microbatches=2 {_BUDGET}",
                f"model=llama_nano mesh=cp2 mesh.cp_method=ring microbatches=2 {_BUDGET}",
            ],
            id="a plan of parts in stages",
        ),
        pytest.param(
            "model=llama_nano mesh=cp2 mesh.cp_method=ring sequence_length=127",
            "or mesh.cp=1 without its options",
            ["model=llama_nano mesh=cp2 mesh.cp=1 sequence_length=127"],
            id="an odd length in a ring",
        ),
        pytest.param(
            "model=llama_nano mesh=ep2 mesh.ep_capacity=1.25",
            "use 1 without its options",
            ["model=llama_nano mesh=ep2 mesh.ep=1"],
            id="a capacity of no experts",
        ),
        pytest.param(
            f"model=moe_nano mesh=cp2 mesh.ep=2 {_BUDGET}",
            "change with each; use ac=full or selective_op",
            [f"model=moe_nano mesh=cp2 mesh.ep=2 ac={name}" for name in ("full", "selective_op")],
            id="a plan of experts of parts",
        ),
        pytest.param(
            "model=moe_nano mesh=cp2 mesh.ep=2 mesh.ep_capacity=1.25",
            "or use mesh.cp=1 without its options",
            ["model=moe_nano mesh=cp2 mesh.cp=1 mesh.dp_shard=2 mesh.ep=2 mesh.ep_capacity=1.25"],
            id="a capacity of parts",
        ),
        pytest.param(
            f"{_RING_OF_STAGES} mesh.reshard_after_forward=false",
            "pp2_cp2 shards nothing under 1f1b; leave it out, or use mesh=shard2",
            [_RING_OF_STAGES],
            id="an option of FSDP where DDP averages",
        ),
        pytest.param(
            f"{_RING_OF_STAGES} mesh.pp_schedule=zbv",
            "ranks of mesh.cp=2 share weights by FSDP here; use false, or mesh.pp_split_backward=false or "
            "mesh.pp_schedule=1f1b",
            [
                f"{_RING_OF_STAGES} mesh.pp_schedule=zbv mesh.reshard_after_forward=false",
                f"{_RING_OF_STAGES} mesh.pp_schedule=zbv mesh.pp_split_backward=false",
                f"{_RING_OF_STAGES} mesh.pp_schedule=1f1b",
            ],
            id="a backward in two parts",
        ),
        pytest.param(
            "mesh=tp2 shard=megatron model=moe_nano",
            "use shard=none and mesh.tp=1",
            ["mesh=tp2 shard=none model=moe_nano mesh.tp=1"],
            id="sizes that depend on data on shards",
        ),
    ],
)
def test_what_follows_a_remedy_composes(refused: str, remedies: str, followed: list[str]) -> None:
    assert remedies in refusal_of(refused)
    for line in followed:
        experiment_of(line)


_STAGES_OF_PARTS = "model=llama_nano mesh=cp2 mesh.pp=2 microbatches=4 batch_size=8"
_OUTSIDE = "ac=full wrap_order=outside_fsdp"


@pytest.mark.parametrize(
    ("line", "whole"),
    [
        pytest.param(
            f"{_STAGES_OF_PARTS} ac=full stage_ac=[none,full]",
            "model=llama_nano microbatches=4 batch_size=8 ac=full",
            id="AC of each stage",
        ),
        pytest.param(
            f"{_STAGES_OF_PARTS} mesh.pp_schedule=zbv mesh.reshard_after_forward=false {_OUTSIDE} "
            "stage_ac=[none,full,full,none]",
            "model=llama_nano microbatches=4 batch_size=8 ac=full",
            id="FSDP for a backward in two parts",
        ),
        pytest.param(
            f"model=llama_nano mesh=cp2 mesh.tp=2 {_OUTSIDE}",
            "model=llama_nano mesh=tp2 ac=full",
            id="FSDP of replicas of split linears",
        ),
        pytest.param(
            f"model=moe_nano mesh=cp2 mesh.ep=2 {_OUTSIDE}", "model=moe_nano ac=full", id="FSDP of experts"
        ),
        pytest.param(
            f"model=llama_nano mesh=cp2 mesh.dp_shard=2 {_OUTSIDE}",
            f"model=llama_nano mesh=shard2 {_OUTSIDE}",
            id="FSDP of ranks with other samples",
        ),
        pytest.param(
            "model=llama_nano mesh=cp2 ac=full wrap_order=call_site",
            "model=llama_nano ac=full wrap_order=call_site",
            id="a region of the whole model",
        ),
        pytest.param(
            f"{_SHARDS} mesh.pp=2 stage_ac=[none,full] {_OUTSIDE}",
            f"{_SHARDS} mesh.ep=1 mesh.pp=2 stage_ac=[none,full] {_OUTSIDE}",
            id="stages that stay",
        ),
    ],
)
def test_the_dense_experiment_composes(line: str, whole: str) -> None:
    assert experiment_of(line).dense() == experiment_of(whole)


def test_refuses_chunks_of_split_tensors() -> None:
    assert refusal_of("mesh=tp2 chunk=minimum") == (
        "mesh.tp: must be 1 for chunk=minimum, which plans operators of whole tensors and no collectives "
        "between them, got 2; use mesh=shard2 or chunk=none"
    )


def test_refuses_chunks_under_fsdp1() -> None:
    assert refusal_of("mesh=shard2 mesh.fsdp=fsdp1 chunk=minimum") == (
        "mesh.fsdp: must be fsdp2 for chunk=minimum: FSDP1 hides the shapes of parameters from a forward "
        "that is planned for other inputs; leave it out or use chunk=none"
    )


_ONE_BUDGET = (
    "chunk: ac=budget plans blocks and chunks for one budget, its own; use chunk=budget without "
    "chunk.budget_mib and chunk.fraction, or chunk=none"
)


@pytest.mark.parametrize(
    ("line", "refusal"),
    [
        pytest.param("ac=budget ac.fraction=0.5 chunk=minimum", _ONE_BUDGET, id="the smallest chunks"),
        pytest.param("ac=budget ac.fraction=0.5 chunk=budget chunk.fraction=0.5", _ONE_BUDGET, id="a share"),
        pytest.param("ac=budget ac.fraction=0.5 chunk=budget chunk.budget_mib=8", _ONE_BUDGET, id="bytes"),
        pytest.param(
            "ac=full chunk=budget",
            "chunk: give one of chunk.budget_mib and chunk.fraction, got neither; without one chunk=budget "
            "follows ac=budget",
            id="nobody's budget",
        ),
    ],
)
def test_refuses_two_budgets_and_none(line: str, refusal: str) -> None:
    assert refusal_of(f"model=mlp {line}") == refusal


def test_to_dict_has_groups_with_names_and_then_the_recipe() -> None:
    resolved = experiment_of("ac=selective_op mesh=shard2 compile=aot_eager microbatches=2").to_dict()
    recipe = {field.name for field in dataclasses.fields(Recipe)} - {"stage_ac"}  # which pipelines alone have
    assert sorted(resolved) == sorted([*GROUPS, *recipe])
    assert {group: resolved[group]["name"] for group in GROUPS} == {
        "model": "gpt_nano",
        "mesh": "shard2",
        "ac": "selective_op",
        "chunk": "none",
        "shard": "none",
        "data": "text",
        "protocol": "standard",
    }
    assert resolved["model"]["family"] == "gpt"
    assert resolved["ac"]["save_ops"] == ["matmul", "conv", "attention"]


@pytest.mark.parametrize("name", sorted(ac_variants.keys() - ABSENT))
def test_a_variant_is_named_by_its_module(name: str, tmp_path: Path) -> None:
    written = tmp_path / "apply.py"
    written.write_text("def apply(model):\n    return model\n", encoding="utf-8")
    needed: dict[str, dict[str, Any]] = {
        "budget": {"fraction": 0.9},
        "file": {"path": str(written)},
        "modules": {"discard": ("*norm",)},
        "python": {"factory": "examples.theirs:every_second"},
    }
    assert name_of(ac_variants[name](**needed.get(name, {}))) == name


def test_refuses_a_recipe_that_says_nothing() -> None:
    with pytest.raises(ConfigError) as refusal:
        Recipe(learning_rate=float("nan"))
    assert str(refusal.value) == "learning_rate: must be above 0, got nan"


@pytest.mark.parametrize("mesh", ["single", "ddp2", "tp2"])
def test_refuses_an_order_around_nothing(mesh: str) -> None:
    assert refusal_of(f"wrap_order=outside_fsdp mesh={mesh}") == (
        f"wrap_order: outside_fsdp needs FSDP, but {mesh} shards nothing; use mesh=shard2 or inside_fsdp"
    )


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize(
    "order", ["wrap_order=inside_fsdp", "wrap_order=outside_fsdp ac.module_classes=[GPTBlock]"]
)
def test_refuses_reentrant_inside_a_sharded_fsdp1_unit(order: str, strategy: str) -> None:
    fsdp1 = f"mesh=shard2 mesh.fsdp=fsdp1 mesh.sharding_strategy={strategy}"
    assert refusal_of(f"{fsdp1} ac=full ac.use_reentrant=true {order}") == FREED


def test_refuses_what_reads_parameters_around_fsdp1() -> None:
    assert refusal_of("mesh=shard2 mesh.fsdp=fsdp1 wrap_order=outside_fsdp ac=nested") == (
        "wrap_order: outside_fsdp does not suit ac=nested, which reads the shapes of parameters that fsdp1 "
        "flattens; use inside_fsdp or mesh.fsdp=fsdp2"
    )


@pytest.mark.parametrize(
    "line",
    [
        "mesh.fsdp=fsdp1 wrap_order=outside_fsdp",
        "mesh.fsdp=fsdp1 wrap_order=call_site",
        "mesh.fsdp=fsdp1 mesh.sharding_strategy=NO_SHARD",
        "mesh.fsdp=fsdp2",
    ],
)
def test_reentrant_is_fine_where_weights_stay(line: str) -> None:
    assert experiment_of(f"mesh=shard2 ac=full ac.use_reentrant=true {line}").mesh.label == "shard2"


@pytest.mark.parametrize(
    ("line", "address"),
    [
        pytest.param("", "3ee7bc39fd16", id="the defaults"),
        pytest.param("ac=full mesh=shard2 dtype=bf16", "24303f550597", id="AC"),
        pytest.param(
            "compile_order=compile_first compile_scope=model", "3ee7bc39fd16", id="options of nothing"
        ),
    ],
)
def test_what_compiles_nothing_has_the_address_that_it_had_before(line: str, address: str) -> None:
    assert trial_id(experiment_of(line).to_dict()) == address


def test_a_file_has_the_address_that_it_had_before_it_could_name_blocks(tmp_path: Path) -> None:
    written = tmp_path / "apply.py"
    written.write_text("def apply(model):\n    return model\n", encoding="utf-8")
    line = f"ac=file ac.path={written}"
    usual = {"name": "file", "path": str(written), "digest": digest_of(written.read_text(encoding="utf-8"))}
    assert experiment_of(line).to_dict()["ac"] == usual
    assert point_of(f"{line} microbatches=3").resolved["ac"] == {**usual, "digest": None}
    asked = experiment_of(f"{line} ac.module_classes=[Block]").to_dict()["ac"]
    assert asked == {**usual, "module_classes": ["Block"]}


def test_options_of_a_compiler_are_part_of_the_address() -> None:
    resolved = experiment_of("compile=aot_eager compile_scope=model").to_dict()
    assert [resolved[name] for name in ("compile", "compile_order", "compile_scope")] == [
        "aot_eager",
        "ac_first",
        "model",
    ]


@pytest.mark.parametrize(
    ("line", "twin"),
    [
        pytest.param("ac=full", ("none", "aot_eager"), id="AC against the same compiler"),
        pytest.param("ac=none", ("none", "none"), id="a compiled model against itself uncompiled"),
    ],
)
def test_the_twin_of_what_is_compiled(line: str, twin: tuple[str, str]) -> None:
    found = experiment_of(f"compile=aot_eager {line}").twin()
    assert (name_of(found.ac), found.compile) == twin


@pytest.mark.parametrize(
    ("line", "relative"),
    [
        pytest.param("compile=aot_eager", None, id="the kernels are the same"),
        pytest.param("compile=inductor", 1e-3, id="generated kernels round otherwise"),
        pytest.param("compile=inductor dtype=bf16", 1e-1, id="in half precision"),
        pytest.param("compile=inductor ac=full", 1e-3, id="recomputed inside kernels that join others"),
        pytest.param("compile=inductor ac=compiler_budget", 1e-3, id="the same by torch"),
        pytest.param("compile=inductor ac=full compile_order=compile_first", None, id="the same kernels"),
        pytest.param("compile=inductor ac=full dtype=bf16", 1e-1, id="recomputed inside kernels"),
        pytest.param(
            "compile=inductor ac=full dtype=bf16 compile_order=compile_first", None, id="kernels run again"
        ),
        pytest.param("compile=inductor ac=compiler_budget dtype=bf16", 1e-1, id="recomputed by torch"),
        pytest.param("compile=aot_eager dtype=bf16", None, id="kernels alike in half precision"),
        pytest.param("compile=aot_eager model.dropout=0.1", None, id="kernels alike with dropout"),
        pytest.param(
            "compile=aot_eager dtype=bf16_mixed model.dropout=0.1", 1e-1, id="dropout in half precision"
        ),
    ],
)
def test_the_tolerance_of_a_compiler(line: str, relative: float | None) -> None:
    tolerance = experiment_of(line).tolerance
    assert (tolerance and tolerance.relative) == relative


@pytest.mark.parametrize(
    ("line", "message"),
    rows(
        {
            "chunk=minimum model=mlp": "compile: aot_eager does not suit chunk=minimum, whose programs no compiler enters; use compile=none or chunk=none",
            "ac=full ac.rewind=true": "ac.rewind: true inside compiled code keeps all of it from being compiled; use ac.rewind=false or compile_order=compile_first",
            "ac=full ac.use_reentrant=true": "ac.use_reentrant: true inside compiled code keeps all of it from being compiled; use ac.use_reentrant=false or compile_order=compile_first",
            "ac=selective_op compile_order=compile_first": "compile_order: compile_first hides all operators from ac=selective_op, and nothing is compiled around the modes that look for them; use compile_order=ac_first",
            "ac=nested compile_scope=model": "compile_scope: model leaves no calls of modules for ac=nested to follow; use blocks",
            "ac=nested ac.labels={layers.0.feed_forward:[0]}": "ac.labels: 'layers.0.feed_forward' lies inside a compiled block, whose calls no tape follows; label blocks, or use compile=none",
            "ac=full mesh=tp2": "compile_order: ac_first does not suit mesh.tp=2: torch does not compile regions of sharded tensors; use compile_order=compile_first",
            "ac=compiler_budget mesh=tp2": "mesh.tp: must be 1 for ac=compiler_budget, got 2: torch's partitioner cannot size the device mesh in graphs of sharded tensors; use mesh=shard2 or another ac",
            "ac=full wrap_order=call_site": "compile_order: ac_first needs wrap_order=inside_fsdp: with call_site regions stand around what is compiled; use compile_order=compile_first",
            "ac=full compile_order=compile_first compile_scope=model": "compile_order: compile_first with compile_scope=model needs wrap_order=call_site: no block of a compiled model can be made a region; use compile_scope=blocks or compile_order=ac_first",
        }
    ),
)
def test_orders_of_ac_and_compilation_that_cannot_be(line: str, message: str) -> None:
    assert refusal_of(f"compile=aot_eager {line}") == message


@pytest.mark.parametrize(
    ("library", "who"), [("fairscale", "fairscale"), ("torchtitan", "torchtitan's SelectiveAC")]
)
def test_libraries_that_recompute_once_are_refused_for_a_split_backward(library: str, who: str) -> None:
    line = "mesh=pp2 mesh.pp_schedule=zbv microbatches=4 model=llama_nano"
    with mock.patch.object(variant, "find_spec", return_value=object()):
        ac = ac_variants[library](layers_fqn="layers")  # type: ignore[call-arg]
    assert dataclasses.replace(experiment_of(f"{line} mesh.pp_split_backward=false"), ac=ac).ac is ac
    with pytest.raises(ConfigError) as error:
        dataclasses.replace(experiment_of(line), ac=ac)
    assert str(error.value) == (
        f"ac: {who} does not suit zbv, whose two parts of a backward ask it twice: it recomputes a region "
        "once; use mesh.pp_split_backward=false or mesh.pp_schedule=1f1b, or ac=full"
    )
