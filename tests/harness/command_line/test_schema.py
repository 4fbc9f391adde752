# ruff: noqa: E501 (a command and what is said about it stand on one line)

from __future__ import annotations

import dataclasses
import functools
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from harness.command_line.schema import (
    Settings,
    experiment_fields,
    settings,
    to_yaml,
    without_idle_options,
    words_of_found,
)
from harness.command_line.unknown_option import CHOICE_KEYS
from harness.experiment.data import data_specs
from harness.experiment.mesh import Mesh
from harness.experiment.protocol import Protocol
from harness.models import families
from harness.models.hf import HFSpec
from harness.report.wandb import publisher
from harness.report.wandb.publisher import Tracker
from harness.sweep.launch import Run
from strategies import ac_variants, chunk_variants, shard_variants
from strategies.ac.full import Full
from strategies.ac.selective_op import SelectiveOp
from tests.covering import marked
from tests.harness.composing import (
    CONF,
    by_hydra,
    composed,
    experiment_of,
    options_of,
    point_of,
    refusal_of,
    rows,
)
from tests.strategies.installed import ABSENT

GROUPS = ("model", "mesh", "ac", "chunk", "shard", "data", "protocol")
CHOICES = [
    pytest.param(group, option, id=f"{group}={option}")
    for group in GROUPS
    for option in options_of(group)
    if group != "ac" or option not in ABSENT
]
TOP_LEVEL = (
    "ac, batch_size, chunk, compile, compile_order, compile_scope, data, dtype, hardware, judge, learning_rate, mesh, "
    "microbatches, model, name, optimizer, outputs_dir, protocol, rerun, search, seed, sequence_length, shard, show, skip_predicted_oom, solve, "
    "stage_ac, strict, sweep, tracker, wrap_order"
)
_LLAMA = "model=hf model.config_class=LlamaConfig"
FULL = "early_stop, layers_fqn, module_classes, offload, preserve_rng_state, rewind, split_backward, use_reentrant"
MESH = (
    "cp, cp_method, cpu_offload, device, dp_replicate, dp_shard, ep, ep_capacity, fsdp, loss_parallel, nodes, pp, "
    "pp_schedule, pp_split_backward, pp_stages_per_rank, reshard_after_forward, sharding_strategy, "
    "sp, sync, tp, use_orig_params"
)


@pytest.fixture(scope="module")
def needed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    """Return what an option cannot do without."""
    path = tmp_path_factory.mktemp("data") / "tokens.npy"
    np.save(path, np.arange(1000, dtype=np.uint16) % 256)
    written = path.with_name("apply.py")
    written.write_text("def apply(model):\n    return model\n")
    return {
        ("model", "python"): "model.factory=tests.harness.user_models:healthy",
        ("ac", "budget"): "ac.fraction=0.9",
        ("ac", "modules"): "ac.discard=[attention]",
        ("ac", "file"): f"ac.path={written}",
        ("ac", "python"): "ac.factory=examples.theirs:every_second",
        ("ac", "transformers"): _LLAMA,
        ("ac", "trl"): _LLAMA,
        ("ac", "compiler_budget"): "compile=aot_eager",
        ("data", "tokens"): f"data.path={path}",
        ("mesh", "ep2"): "model=moe_nano",
        **{("mesh", name): "model=llama_nano microbatches=4" for name in ("pp2", "pp4", "shard2_pp2")},
        ("chunk", "budget"): "chunk.fraction=0.9 model=mlp model.n_layers=1",
        ("chunk", "minimum"): "model=mlp model.n_layers=1",
        ("chunk", "tiles"): "model=llama_nano model.n_layers=1 chunk.tiles={feed_forward:2}",
        **{("shard", name): "mesh=tp2" for name in shard_variants if name != "none"},
    }


def test_an_option_of_a_group_is_the_node_of_its_name_alone() -> None:
    """Hydra composes the options of all groups in turns, `composed` puts them together by itself."""
    options = {group: options_of(group) for group in (*GROUPS, "tracker")}
    for turn in range(max(map(len, options.values()))):
        words = [f"{group}={names[turn % len(names)]}" for group, names in options.items()]
        assert OmegaConf.to_yaml(composed(words)) == OmegaConf.to_yaml(by_hydra(words))


_shared = functools.cache(experiment_of)
"""Composes once what several tests look at; experiments are frozen."""


@pytest.mark.parametrize(("group", "option"), CHOICES)
def test_every_option_of_every_group_is_an_experiment(
    group: str, option: str, needed: dict[tuple[str, str], str]
) -> None:
    experiment = _shared(f"{group}={option} {needed.get((group, option), '')}")
    again = pickle.loads(pickle.dumps(experiment))
    assert again == experiment
    assert hash(again) == hash(experiment)
    assert again.to_dict() == experiment.to_dict() == json.loads(json.dumps(experiment.to_dict()))
    with pytest.raises(dataclasses.FrozenInstanceError):
        experiment.seed = 1  # type: ignore[misc]


_COMPOSED = [
    (ac, mesh)
    for ac in sorted(ac_variants.keys() - ABSENT)
    for mesh in ("single", "ddp2", "shard2", "tp2", "shard2_tp2", "hsdp2x2")
    if not (ac == "compiler_budget" and "tp" in mesh)  # refused
]


@pytest.mark.parametrize(("ac", "mesh"), marked(_COMPOSED, _COMPOSED[::5]))  # every variant, every mesh
def test_every_variant_composes_with_every_mesh(ac: str, mesh: str, tmp_path: Path) -> None:
    written = tmp_path / "apply.py"
    written.write_text("def apply(model):\n    return model\n")
    asked = {
        "compiler_budget": "compile=aot_eager",
        "budget": "ac.fraction=0.9",
        "modules": "ac.discard=[attention]",
        "file": f"ac.path={written}",
        "python": "ac.factory=examples.theirs:every_second",
        "transformers": _LLAMA,
        "trl": _LLAMA,
    }
    resolved = experiment_of(f"ac={ac} mesh={mesh} {asked.get(ac, '')}").to_dict()
    assert (resolved["ac"]["name"], resolved["mesh"]["name"]) == (ac, mesh)


@pytest.mark.parametrize("tracker", options_of("tracker"))
def test_every_tracker_is_a_setting(tracker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "_PACKAGES", dict.fromkeys(("wandb", "trackio", "mlflow"), ()))
    assert settings(composed([f"tracker={tracker}"])).tracker == Tracker(name=tracker)


@pytest.mark.parametrize("sweep", options_of("sweep"))
def test_every_sweep_preset_composes(sweep: str) -> None:
    config = composed([f"sweep={sweep}"])
    assert settings(config).run.name == sweep
    assert point_of(f"sweep={sweep}").refusal is None


def _class_of(group: str, file: str, values: dict[Any, Any]) -> type[Any]:
    strategies: dict[str, dict[str, type[Any]]] = {
        "ac": ac_variants,
        "chunk": chunk_variants,
        "shard": shard_variants,
    }
    if group in strategies:
        return strategies[group][file]
    one = {"mesh": Mesh, "protocol": Protocol, "tracker": Tracker}
    if group in one:
        return one[group]
    return families()[values["family"]] if group == "model" else data_specs()[file]


@pytest.mark.parametrize(
    ("group", "option"),
    [
        *CHOICES,
        *(pytest.param("tracker", option, id=f"tracker={option}") for option in options_of("tracker")),
    ],
)
def test_a_file_has_the_fields_of_its_class_and_no_others(group: str, option: str) -> None:
    values = OmegaConf.to_container(OmegaConf.load(CONF / group / f"{option}.yaml"))
    assert isinstance(values, dict)
    fields = {field.name for field in dataclasses.fields(_class_of(group, option, values))}
    assert set(values) - (set(CHOICE_KEYS) - fields) == fields


@pytest.mark.parametrize("group", ["ac", "chunk", "shard"])
def test_every_variant_has_its_file_and_every_file_its_variant(group: str) -> None:
    variants: dict[str, dict[str, type[Any]]] = {
        "ac": ac_variants,
        "chunk": chunk_variants,
        "shard": shard_variants,
    }
    assert options_of(group) == sorted(variants[group])


def test_the_main_file_has_every_other_field() -> None:
    config = OmegaConf.load(CONF / "config.yaml")
    recipe = {
        "wrap_order",
        "compile",
        "compile_order",
        "compile_scope",
        "optimizer",
        "learning_rate",
        "dtype",
        "seed",
        "batch_size",
        "microbatches",
        "stage_ac",
    }
    run = {field.name for field in dataclasses.fields(Run)}
    assert set(config) == {"defaults", "hydra", "search", "sequence_length", "show", "solve", *recipe, *run}


def test_defaults_of_the_main_file_are_those_of_the_classes() -> None:
    chosen = settings(composed([]))
    assert chosen == Settings(run=Run(), tracker=Tracker())
    assert experiment_of("").protocol == Protocol()
    assert experiment_of("").mesh == Mesh(device="cpu")
    assert experiment_of("ac=full").ac == Full(layers_fqn="layers")
    assert experiment_of("ac=selective_op").ac == SelectiveOp(layers_fqn="layers")


def test_blocks_are_those_of_the_model_unless_the_variant_says_otherwise() -> None:
    assert experiment_of("model=hf ac=full").ac == Full(layers_fqn="transformer.h")


@pytest.mark.parametrize(
    ("line", "layers_fqn", "classes"),
    [
        pytest.param(
            "model=python model.factory=tests.harness.user_models:healthy", "layers", (), id="a factory"
        ),
        pytest.param(
            "model=python model.factory=tests.harness.user_models:healthy model.layers_fqn=''",
            "",
            (),
            id="none on purpose",
        ),
        pytest.param("model=hf model.config_class=LlamaConfig", "model.layers", (), id="transformers"),
        pytest.param(
            "model=hf model.config_class=T5Config", "decoder.block", ("T5Block",), id="two containers"
        ),
        pytest.param(
            "model=hf model.config_class=T5Config ac.layers_fqn=encoder.block",
            "decoder.block",
            (),
            id="those that ac names",
        ),
        pytest.param(
            "model=hf model.config_class=T5Config ac.module_classes=[T5Stack]",
            "decoder.block",
            ("T5Stack",),
            id="classes",
        ),
    ],
)
def test_blocks_are_found_where_nobody_names_them(
    line: str, layers_fqn: str, classes: tuple[str, ...]
) -> None:
    resolved = point_of(f"{line} ac=full").resolved
    assert resolved["model"]["layers_fqn"] == layers_fqn
    assert resolved["ac"]["module_classes"] == list(classes)
    assert resolved["ac"]["layers_fqn"] == ("encoder.block" if "ac.layers_fqn" in line else layers_fqn)


def test_a_trial_with_found_blocks_is_the_one_that_names_them() -> None:
    line = "model=python model.factory=tests.harness.user_models:healthy ac=full"
    assert point_of(line).trial_id == point_of(f"{line} model.layers_fqn=layers").trial_id


def test_found_blocks_are_words_of_a_command() -> None:
    found, named = (
        experiment_fields(composed(["model=hf", *more])) for more in ([], ["model.layers_fqn=transformer.h"])
    )
    assert words_of_found(found) == "model.layers_fqn=transformer.h (found: 2 GPT2Block)"
    assert words_of_found(named) is None
    t5 = experiment_fields(composed(["model=hf", "model.config_class=T5Config"]))
    assert (
        words_of_found(t5) == "model.layers_fqn=decoder.block ac.module_classes=[T5Block] (found: 4 T5Block)"
    )


def test_lists_become_tuples() -> None:
    variant = experiment_of("ac=selective_op ac.save_ops=[matmul] ac.module_classes=[GPTBlock]").ac
    assert variant == SelectiveOp(save_ops=("matmul",), module_classes=("GPTBlock",), layers_fqn="layers")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param("", "name=another", id="the name of the sweep"),
        pytest.param("", "tracker=none", id="the tracker"),
        pytest.param("", "outputs_dir=elsewhere rerun=true strict=true", id="where results go"),
        pytest.param("mesh=single mesh.dp_shard=2", "mesh=shard2", id="a mesh by numbers or by name"),
        pytest.param("batch_size=8", "", id="a default that is spelled out"),
        pytest.param("learning_rate=1e-3", "learning_rate=0.001", id="a number in two spellings"),
        pytest.param("seed=2 batch_size=4", "batch_size=4 seed=2", id="the order of overrides"),
        pytest.param("ac=full", "ac=full ac.layers_fqn=layers", id="an interpolation or what it leads to"),
    ],
)
def test_trial_id_is_the_same_whatever(one: str, other: str) -> None:
    assert point_of(one).trial_id == point_of(other).trial_id


def test_trial_id_differs_with_every_field() -> None:
    lines = [
        "",
        "seed=1",
        "batch_size=4",
        "sequence_length=64",
        "learning_rate=0.1",
        "optimizer=sgd",
        "dtype=bf16",
        "model.dropout=0.1",
        "model=mlp",
        "mesh=ddp2",
        "mesh=shard2",
        "mesh=shard2 mesh.reshard_after_forward=false",
        "ac=full",
        "ac=full ac.early_stop=false",
        "data=synthetic",
        "protocol.parity_steps=4",
        "wrap_order=call_site",
    ]
    assert len({point_of(line).trial_id for line in lines}) == len(lines)


@pytest.mark.parametrize(
    ("line", "message"),
    rows(
        {
            "modle=gpt_nano": f"modle: unknown option; did you mean 'model'? options: {TOP_LEVEL}",
            "batchsize=2": f"batchsize: unknown option; did you mean 'batch_size'? options: {TOP_LEVEL}",
            "+batchsize=2": f"batchsize: unknown option; did you mean 'batch_size'? options: {TOP_LEVEL}",
            "hardwere=h100": f"hardwere: unknown option; did you mean 'hardware'? options: {TOP_LEVEL}",
            "model=gpt_nan": "model: unknown option 'gpt_nan'; did you mean 'gpt_nano'? options: "
            + ", ".join(options_of("model")),
            "mesh=big": f"mesh: unknown option 'big'; options: {', '.join(options_of('mesh'))}",
            "ac=fall": f"ac: unknown option 'fall'; did you mean 'full'? options: {', '.join(options_of('ac'))}",
            "model=mlp model.n_layer=3": "model.n_layer: model=mlp has no such option; did you mean 'n_layers'? options: "
            "dropout, hidden_width, layers_fqn, n_layers, vocab_size, width",
            "mesh.dp_shards=2": f"mesh.dp_shards: unknown option; did you mean 'dp_shard'? options: {MESH}",
            "ac=selective_layer ac.acfreq=2": "ac.acfreq: ac=selective_layer has no such option; did you mean 'ac_freq'? options: ac_freq, "
            + FULL.replace("layers_fqn", "first, last, layers, layers_fqn"),
            "ac=full +ac.ac_freq=2": f"ac.ac_freq: ac=full has no such option; options: {FULL}",
            "ac.ac_freq=2": "ac.ac_freq: ac=none has no such option; there are no options",
            "ac=full ac.name=ful": f"ac.name: unknown 'ful'; did you mean 'full'? options: {', '.join(options_of('ac'))}",
            "~mesh": "mesh: cannot be deleted: every experiment needs it; remove '~mesh' from the command",
            "~rerun": "rerun: cannot be deleted: every experiment needs it; remove '~rerun' from the command",
            "+ac=full": "Multiple values for ac. To override a value use 'override ac: full'",
        }
    ),
)
def test_refuses_what_does_not_exist(line: str, message: str) -> None:
    assert refusal_of(line) == message


@pytest.mark.parametrize(
    ("line", "message"),
    rows(
        {
            "model.n_layers=three": "model.n_layers: must be an integer, got 'three'",
            "model.n_layers=2.5": "model.n_layers: must be an integer, got 2.5",
            "model.dropout=much": "model.dropout: must be a number, got 'much'",
            "model.dropout=nan": "model.dropout: must be a finite number, got nan",
            "batch_size=null": "batch_size: must be an integer, got None",
            "batch_size=1e3": "batch_size: must be an integer, got 1000.0",
            "learning_rate=inf": "learning_rate: must be a finite number, got inf",
            "protocol.deadline_s=nan": "protocol.deadline_s: must be a finite number, got nan",
            "tracker.deadline_s=-inf": "tracker.deadline_s: must be a finite number, got -inf",
            "mesh.tp=two": "mesh.tp: must be an integer, got 'two'",
            "mesh.cpu_offload=perhaps": "mesh.cpu_offload: must be true or false, got 'perhaps'",
            "rerun=perhaps": "rerun: must be true or false, got 'perhaps'",
            "ac=full ac.module_classes=GPTBlock": "ac.module_classes: must be a list, got 'GPTBlock'",
            "ac=selective_layer ac.ac_freq=null": "ac.ac_freq: must be an integer, got None",
            "ac=selective_op ac.matmul_recompute_every=often": "ac.matmul_recompute_every: must be an integer or null, got 'often'",
            "ac=selective_op ac.save_ops=3": "ac.save_ops: must be the name of a preset or a list of names, got 3",
            "ac=selective_op ac.save_ops={a:1}": "ac.save_ops: must be a word or a list, got {'a': 1}",
            "model=hf model.overrides={layer_norm_epsilon:nan}": "model.overrides.layer_norm_epsilon: must be a finite number, got nan",
            "model=python": "model.factory: has no default; give it a value",
            "data=tokens": "data.path: has no default; give it a value",
            "model.family=llama": "model.n_kv_heads: has no default; give it a value",
            "batch_size=${seeed}": "batch_size: Interpolation key 'seeed' not found",
        }
    ),
)
def test_refuses_another_type(line: str, message: str) -> None:
    assert refusal_of(line) == message


@pytest.mark.parametrize(
    ("line", "message"),
    rows(
        {
            "model.n_layers=0": "model.n_layers: must be at least 1, got 0",
            "model.dropout=1.0": "model.dropout: must be in [0, 1), got 1.0",
            "model.dropout=-0.1": "model.dropout: must be in [0, 1), got -0.1",
            "model.n_heads=3": "model.n_heads: must divide model.width, 128, got 3",
            "model=llama_nano model.n_kv_heads=3": "model.n_kv_heads: must divide model.n_heads, 4, got 3",
            "model=moe_nano model.top_k=5": "model.top_k: must be at most model.n_experts, 4, got 5",
            "batch_size=0": "batch_size: must be at least 1, got 0",
            "sequence_length=0": "sequence_length: must be at least 1, got 0",
            "batch_size=99999999999999": "batch_size: must be at most 2147483647, got 99999999999999",
            "batch_size=1000000000000000000000000": "batch_size: must be at most 9223372036854775807, "
            "got 1000000000000000000000000",
            "sequence_length=2147483648": "sequence_length: must be at most 2147483647, got 2147483648",
            "model.width=9223372036854775808": "model.width: must be at most 9223372036854775807, "
            "got 9223372036854775808",
            "seed=-9223372036854775809": "seed: must be at least -9223372036854775807, "
            "got -9223372036854775809",
            "model=python model.factory=a:b model.kwargs=[1,2]": "model.kwargs: must be a mapping or null, got [1, 2]",
            "seed=-1": "seed: must be at least 0, got -1",
            "seed=9223372036854775808": "seed: must be at most 9223372036854775807, got 9223372036854775808",
            "learning_rate=0": "learning_rate: must be above 0, got 0.0",
            "dtype=fp64": "dtype: must be one of own, fp32, bf16, bf16_mixed, got 'fp64'",
            "optimizer=lion": "optimizer: must be one of adamw, sgd, got 'lion'",
            "compile=eager": "compile: must be one of none, aot_eager, inductor, got 'eager'",
            "compile_order=last": "compile_order: must be one of ac_first, compile_first, got 'last'",
            "compile_scope=layers": "compile_scope: must be one of blocks, model, got 'layers'",
            "wrap_order=in": "wrap_order: must be one of inside_fsdp, outside_fsdp, call_site, got 'in'",
            "ac=selective_layer ac.ac_freq=0": "ac.ac_freq: must be at least 1, got 0",
            "protocol.parity_steps=0": "protocol.parity_steps: must be at least 1, got 0",
            "protocol.warmup_steps=-1": "protocol.warmup_steps: must be at least 0, got -1",
            "protocol.timed_pairs=-1": "protocol.timed_pairs: must be at least 0, got -1",
            "protocol.deadline_s=0": "protocol.deadline_s: must be at least 1, got 0.0",
            "tracker.name=aim": "tracker.name: must be one of offline, online, none, trackio, mlflow, got 'aim'",
            "tracker.project=''": "tracker.project: must name a project, got ''",
            "tracker.deadline_s=0": "tracker.deadline_s: must be at least 1, got 0.0",
            "name=''": "name: must name a folder below outputs_dir, got ''",
            "name=..": "name: must name a folder below outputs_dir, got '..'",
            "name=a/b": "name: must hold no path separator and no control character, got 'a/b'",
        }
    ),
)
def test_refuses_what_is_out_of_range(line: str, message: str) -> None:
    assert refusal_of(line) == message


def test_a_refused_point_is_described_as_far_as_it_is_known() -> None:
    point = point_of("mesh=single mesh.dp_shard=2 learning_rate=nan")
    assert point.experiment is None
    assert point.resolved["mesh"]["name"] == "shard2"
    assert point.resolved["learning_rate"] == "nan"
    assert len(point.trial_id) == 12


def test_a_refused_point_has_the_model_of_others() -> None:
    refused, other = (point_of(f"model=gpt_nano model.layers_fqn=null ac={ac}") for ac in ("budget", "full"))
    assert refused.experiment is None
    assert other.experiment is not None
    assert refused.resolved["model"] == other.resolved["model"]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("mesh=single mesh.pp_schedule=gpipe", "single"),
        ("mesh=shard2_pp2 mesh.pp_stages_per_rank=3", "shard2_pp2"),
        ("mesh.tp=0", None),
        ("mesh.tp=many", None),
    ],
    ids=[
        "an option without a reader",
        "an option out of range",
        "a size out of range",
        "a size that is none",
    ],
)
def test_a_refused_mesh_has_the_name_that_its_sizes_make(line: str, name: str | None) -> None:
    assert point_of(line).resolved["mesh"].get("name") == name


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        ("seed=1", "seed=true", "seed: must be an integer, got True"),
        ("seed=1", "seed=1.5", "seed: must be an integer, got 1.5"),
        ("strict=true", "strict=null", "strict: must be true or false, got None"),
    ],
)
def test_a_value_that_was_good_before_lends_its_type_to_no_other(good: str, bad: str, message: str) -> None:
    point_of(good)
    assert refusal_of(bad) == message
    point_of(good)


def test_experiments_share_no_value_that_can_change() -> None:
    first, second = (experiment_of("model=hf model.overrides={n_layer:2}") for _ in range(2))
    assert isinstance(first.model, HFSpec)
    assert first.model.overrides is not None
    first.model.overrides["n_layer"] = 3
    assert second.model == dataclasses.replace(first.model, overrides={"n_layer": 2})


def test_options_refer_to_any_other() -> None:
    texts = CONF.parent / "harness" / "experiment" / "texts"
    experiment = experiment_of(
        f"data.path=${{outputs_dir}}/${{name}}.txt outputs_dir={texts} name=constitution"
    )
    assert experiment.to_dict()["data"] == {"name": "text", "path": str(texts / "constitution.txt")}


@pytest.mark.parametrize(("group", "option"), CHOICES)
def test_yaml_is_that_of_the_whole(group: str, option: str, needed: dict[tuple[str, str], str]) -> None:
    resolved = _shared(f"{group}={option} {needed.get((group, option), '')}").to_dict()
    assert to_yaml(resolved) == OmegaConf.to_yaml(OmegaConf.create(resolved))


@pytest.mark.parametrize(
    ("chosen", "swept", "left"),
    [
        pytest.param("full", {"full", "budget"}, set(), id="of another variant of the sweep"),
        pytest.param("budget", {"full", "budget"}, {"fraction"}, id="its own"),
        pytest.param(
            "full", {"full", "selective_op"}, {"fraction"}, id="of none of the sweep: refused later"
        ),
        pytest.param("none", {"none"}, set(), id="none ignores those of all"),
    ],
)
def test_a_point_leaves_options_to_the_variants_that_have_them(
    chosen: str, swept: set[str], left: set[str]
) -> None:
    groups: dict[str, set[str]] = {"ac": swept, "chunk": set(), "shard": set()}
    fields = without_idle_options({"ac": {"name": chosen, "fraction": 0.5}}, groups)
    assert set(fields["ac"]) == {"name"} | left
