# ruff: noqa: E501 (a command and what is said about it stand on one line)

from __future__ import annotations

import inspect
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from harness.command_line.schema import experiment_fields, materialise
from harness.errors import ConfigError, Terminated, UnplannedError
from harness.experiment import devices
from harness.experiment.experiment import Experiment
from harness.launchers.local import RANKS_PER_CORE
from harness.models import ModelSpec
from harness.trial.preflight import Preflight
from harness.trial.without_memory import show
from strategies.tracing.shadow import Shadow
from tests.harness import user_models
from tests.harness.composing import composed, experiment_of, point_of, refusal_of, rows

GROUPS = "groups are: matmul, conv, attention, comm, max, topk; an operator is written as aten.mm.default"
GPT_CLASSES = "CausalSelfAttention, Dropout, Embedding, FeedForward, GPTBlock, LayerNorm, Linear, ModuleList"
USER = "tests.harness.user_models"

_PP2 = "mesh=pp2 microbatches=4 model=llama_nano"


@pytest.mark.parametrize(
    ("line", "message"),
    rows(
        {
            "ac=full ac.layers_fqn=blocks": "ac.layers_fqn: 'blocks' is not a module of GPT; "
            "containers are: layers",
            "ac=full ac.layers_fqn=layers.0": "ac.layers_fqn: 'layers.0' is a GPTBlock, not a ModuleList, "
            "ModuleDict or Sequential; containers are: layers",
            "ac=full ac.layers_fqn=''": "ac.layers_fqn: is empty; name the module that holds the blocks, "
            "containers are: layers",
            "model.layers_fqn=blocks": "model.layers_fqn: must name a ModuleList, ModuleDict or Sequential of "
            "GPT, got 'blocks'; containers here: layers",
            "model.layers_fqn=blocks ac=full": "model.layers_fqn: must name a ModuleList, ModuleDict or "
            "Sequential of GPT, got 'blocks'; containers here: layers",
            "ac=full ac.module_classes=[GPTBlok]": "ac.module_classes: 'GPTBlok' is no class of a module in "
            f"GPT; did you mean 'GPTBlock'? classes are: {GPT_CLASSES}",
            "ac=full ac.module_classes=[GPTBlock,FeedForward]": "ac.module_classes: "
            "'layers.0.feed_forward' (FeedForward) lies inside 'layers.0' (GPTBlock); name one of them",
            "ac=full ac.module_classes=[GPTBlock] wrap_order=call_site": "ac.module_classes: has no effect: "
            "call_site makes the whole model one region",
            "ac=full ac.layers_fqn=blocks wrap_order=call_site": "ac.layers_fqn: has no effect: "
            "call_site makes the whole model one region",
            "ac=selective_layer wrap_order=call_site": "wrap_order: call_site makes the model one region, and "
            "selective_layer chooses among blocks; use ac=full",
        }
    ),
)
def test_refuses_blocks_that_are_not_there(line: str, message: str) -> None:
    assert refusal_of(line) == message


_ACROSS = (
    *(f"layers.0.{name}" for name in ("feed_forward_norm", "feed_forward", "dropout")),
    "layers.1.attention_norm",
)
ACROSS = "ac=nested ac.labels={" + ",".join(f"{name}:0" for name in _ACROSS) + "}"


@pytest.mark.parametrize(
    ("line", "message"),
    rows(
        {
            "ac=nested ac.levels=[5]": "ac.levels: [5] asks for 5 regions of 4 blocks; every region needs one "
            "block at least",
            "ac=nested ac.labels={layers.9:0}": "ac.labels: 'layers.9' names no submodule; submodules are: "
            "embedding, position, dropout, layers, layers.0, layers.0.attention_norm, layers.0.attention, "
            "layers.0.attention.wq and 45 more",
            "ac=nested wrap_order=call_site": "wrap_order: call_site does not suit Nested; use inside_fsdp",
            f"{ACROSS} mesh=shard2": "ac.labels: a region begins inside 'layers.0', an FSDP unit, and ends "
            "outside of it, or the other way round; end it with 'layers.0'",
        }
    ),
)
def test_refuses_regions_that_do_not_fit_the_model(line: str, message: str) -> None:
    assert refusal_of(line) == message


def test_a_region_may_begin_in_one_block_and_end_in_the_next() -> None:
    assert experiment_of(f"{ACROSS} mesh=ddp2").mesh.label == "ddp2"


@pytest.mark.parametrize(
    ("line", "message"),
    rows(
        {
            "shard=candidate shard.modules=blocks": "shard.modules: 'blocks' matches no linear; there are "
            "layers.0.attention.wq, layers.0.attention.wk, layers.0.attention.wv, layers.0.attention.wo, ...",
            "shard=candidate shard.candidate=S1R": "shard.candidate: 'layers.0.attention.wq' has no candidate 'S1R'; "
            "it has: RR = RR x RR, S0R = S0R x RR_0, S0R = S0R x RR_1, RR = RS0 x S0R, RS0 = RR x RS0",
            "shard=cheapest shard.memory_limit_mib=1": "shard.memory_limit_mib: no plan fits 1.0 MiB a rank; "
            "the smallest takes 28.571",
            "shard=megatron model=moe_nano": "shard: needs sizes that do not depend on data; those of 'where' at "
            "feed_forward.py do; use shard=none and mesh.tp=1",
        }
    ),
)
def test_refuses_a_model_that_cannot_be_sharded_so(line: str, message: str) -> None:
    assert re.sub(r"(?<=\.py):\d+", "", refusal_of(f"mesh=tp2 {line}")) == message


@pytest.mark.parametrize(
    ("line", "message"),
    rows(
        {
            "ac=selective_op ac.save_ops=[]": "ac.save_ops: is empty, which is full AC; use ac=full, or name "
            "some of matmul, conv, attention, comm, max, topk",
            "ac=selective_op ac.save_ops=[matmull]": "ac.save_ops: 'matmull' is no group and no operator; "
            f"did you mean 'matmul'? {GROUPS}",
            "ac=selective_op ac.save_ops=[aten.mm.defualt]": "ac.save_ops: 'aten.mm.defualt' is no group and "
            f"no operator; did you mean 'aten.mm.default'? {GROUPS}",
            "ac=selective_op ac.save_ops=[aten.mm]": "ac.save_ops: 'aten.mm' is an operator packet, which "
            "never matches; its overloads are: aten.mm.default, aten.mm.dtype",
            "ac=selective_op ac.save_ops=[aten.add_.Tensor]": "ac.save_ops: 'aten.add_.Tensor' writes to its "
            "inputs, which saving would skip; name an operator that does not",
            "ac=selective_op ac.save_ops=matmul": "ac.save_ops: 'matmul' is no preset; presets are: "
            "modalities, torchtitan; otherwise write the list [matmul]",
            "ac=selective_op ac.matmul_recompute_every=1": "ac.matmul_recompute_every: must be 0 (never) or "
            "at least 2, got 1; to recompute every matmul use ac=full",
            "ac=selective_op ac.save_ops=[attention] ac.matmul_recompute_every=2": "ac.matmul_recompute_every: "
            "is 2, but ac.save_ops names no matmul; add matmul, or use 0",
            "ac=selective_op ac.use_reentrant=true": "ac.use_reentrant: must be false: reentrant "
            "recomputation cannot save single operators",
        }
    ),
)
def test_refuses_operators_that_cannot_be_saved(line: str, message: str) -> None:
    assert refusal_of(line) == message


@pytest.mark.parametrize(
    ("line", "message"),
    rows(
        {
            "mesh=ddp2 batch_size=3": "batch_size: must be a multiple of the 2 data-parallel ranks of ddp2, "
            "got 3",
            "mesh=hsdp2x2 batch_size=6": "batch_size: must be a multiple of the 4 data-parallel ranks of "
            "hsdp2x2, got 6",
            "mesh.tp=3": "mesh.tp: must divide model.n_heads, 4, got 3",
            "mesh=pp2 microbatches=4": "mesh.pp: the head of model 'gpt_nano' has no weight but that of the "
            "embedding, and the two are in different stages; use model.tied_head=false",
            "mesh=pp2 microbatches=4 model=evoformer": "mesh.pp: Evoformer cannot be cut between its blocks: "
            "'layers.1' takes 2 tensors as 'layers.0' gives them; use mesh.pp=1 without its options, or a model "
            "whose forward hands one tensor from block to block",
            "mesh=pp2 microbatches=4 model=unet": "mesh.pp: UNet cannot be cut between its blocks: they pass on "
            "tensors of 8 shapes or dtypes; use mesh.pp=1 without its options, or a model whose forward hands one "
            "tensor from block to block",
            "mesh=pp2 microbatches=4 model=hf": "mesh.pp: the head of GPT2Config has no weight but that of the "
            "embedding, and the two are in different stages; use model.overrides={tie_word_embeddings: false}",
            "mesh=pp2 microbatches=4 model=hf model.config_class=T5Config": "mesh.pp: T5Config has an encoder and "
            "a decoder, whose blocks all read what the encoder gives; use mesh.pp=1 without its options, or a "
            "decoder such as LlamaConfig",
            "mesh=pp2 microbatches=4 model=hf model.n_layers=1 model.overrides={tie_word_embeddings:false}": (
                "mesh.pp: makes 2 stages of 1 blocks, which leaves a stage without any; use fewer ranks or "
                "stages, or a model with more blocks"
            ),
            "mesh=pp2 microbatches=4 model=python model.factory=tests.harness.user_models:healthy": (
                "model.pp_split: must name the containers of blocks between which 2 stages are cut; use "
                "model.pp_split=[layers], or mesh.pp=1 without its options"
            ),
            "mesh=pp2 microbatches=4 model=python model.factory=tests.harness.user_models:healthy "
            "model.pp_split=[blocks]": "model.pp_split: must name a ModuleList, ModuleDict or Sequential of "
            "Stack, got 'blocks'; containers here: layers",
            "mesh=pp2 microbatches=4 model=python model.factory=tests.harness.user_models:ties_its_head "
            "model.pp_split=[layers]": "model.pp_split: stages 0 and 1 both read 'embedding.weight' or "
            "'head.weight', and a weight is in one stage; untie them, or use mesh.pp=1 without its options",
            "mesh=pp4 microbatches=4 model=llama_nano mesh.pp_schedule=zbv": "mesh.pp: makes 8 stages of 4 "
            "blocks, which leaves a stage without any; use fewer ranks or stages, or more model.n_layers",
            "mesh=pp2 model=llama_nano": "microbatches: must be at least the 2 stages for "
            "mesh.pp_schedule=1f1b, got 1; use mesh.pp_schedule=gpipe, or more",
            "mesh=pp4 model=llama_nano mesh.pp_schedule=zero_bubble mesh.pp_stages_per_rank=1 batch_size=9 "
            "microbatches=9": "microbatches: must be a multiple of the 2 rounds that zero_bubble makes of them "
            "over 4 ranks, got 9; use a multiple of 4",
            f"{_PP2} ac=full stage_ac=[full]": "stage_ac: must name one variant a stage, got 1; there are 2 "
            "stages",
            "ac=full stage_ac=[full,none]": "stage_ac: must name one variant a stage, got 2; there are no stages, "
            "which mesh=pp2 has",
            f"{_PP2} ac=full stage_ac=[[full],{{a:1}}]": "stage_ac: must be of full, nested, none, offload, "
            "selective_layer, selective_op, torch_remat, got ('full',)",
            f"{_PP2} ac=full stage_ac=[full,python]": "stage_ac: must be of full, nested, none, offload, "
            "selective_layer, selective_op, torch_remat, got 'python'",
            f"{_PP2} ac=full stage_ac=[none,none]": "stage_ac: must have full for a stage, got none, none; leave "
            "it out",
            f"{_PP2} ac=full stage_ac=[nested,none]": "stage_ac: must have full for a stage, got nested, none; "
            "use ac=nested",
            f"{_PP2} stage_ac=[full,none]": "stage_ac: has no effect with ac=none, got full, none; use ac=full",
            f"{_PP2} ac=full stage_ac=[full,budget]": "stage_ac: must be of full, nested, none, offload, "
            "selective_layer, selective_op, torch_remat, got 'budget'; ac=budget plans for each stage, without "
            "stage_ac",
            f"{_PP2} ac=budget ac.fraction=0.8 stage_ac=[budget,none]": "stage_ac: must be empty for ac=budget, "
            "which plans for each stage, got budget, none; leave it out",
            f"{_PP2} mesh.pp_schedule=zbv ac=full stage_ac=[full,torch_remat,none,none]": "ac: torch_remat does "
            "not suit zbv, whose two parts of a backward ask it twice: it recomputes a region once; use "
            "mesh.pp_split_backward=false or mesh.pp_schedule=1f1b, or ac=full",
            "mesh=pp2 microbatches=3 model=llama_nano": "microbatches: must divide the 8 samples of a step, "
            "got 3; make batch_size a multiple of 3",
            "mesh=pp2 microbatches=4 model=llama_nano wrap_order=call_site ac=full": "wrap_order: mesh.pp=2 "
            "cuts the model into stages, and call_site makes one region of the whole; use inside_fsdp, or "
            "mesh.pp=1 without its options",
            "mesh=pp2 microbatches=4 model=llama_nano compile=aot_eager compile_scope=model": "compile_scope: "
            "must be blocks: mesh.pp=2 cuts the model into stages, whose forwards end in the middle of the "
            "model's, got model; or use compile=none",
            "mesh=pp2 microbatches=4 model=llama_nano model.dropout=0.1 compile=aot_eager ac=compiler_budget": "ac: "
            "compiler_budget draws random numbers in backward: mesh.pp=2 cuts the model into stages, where a later forward of "
            "another micro-batch finds them drawn; use ac=full, or no dropout",
            "mesh=pp2 microbatches=4 model=llama_nano compile=inductor mesh.pp_schedule=zbv": "compile: inductor "
            "does not suit zbv, whose two parts of a backward run generated code twice; use aot_eager, "
            "mesh.pp_split_backward=false or mesh.pp_schedule=1f1b",
            "mesh=pp2 microbatches=4 model=llama_nano compile=aot_eager ac=budget ac.fraction=0.8 "
            "ac.executor=compiled": "ac.executor: must be eager: mesh.pp=2 cuts the model into stages, whose "
            "calls in flight no plan of one graph counts, got compiled; or use mesh.pp=1 without its options",
            "mesh=pp2 microbatches=4 model=llama_nano chunk=budget chunk.fraction=0.5": "chunk: mesh.pp=2 cuts "
            "the model into stages, and chunk=budget plans the whole; use chunk=none, or mesh.pp=1 without its "
            "options",
            "mesh=pp2 microbatches=4 model=llama_nano ac=budget ac.fraction=0.5 ac.host_gib=1": "ac.host_gib: "
            "must be 0: mesh.pp=2 cuts the model into stages, and plans of stages move nothing to the host, "
            "got 1; or use mesh.pp=1 without its options",
            "mesh=pp2 mesh.pp_schedule=zbv microbatches=4 model=llama_nano ac=torch_remat": "ac: torch_remat "
            "does not suit zbv, whose two parts of a backward ask it twice: it recomputes a region once; "
            "use mesh.pp_split_backward=false or mesh.pp_schedule=1f1b, or ac=full",
            "mesh=pp2 mesh.pp_schedule=zbv microbatches=4 model=llama_nano ac=full ac.use_reentrant=true": (
                "ac.use_reentrant: true does not suit zbv, which asks for gradients of inputs by "
                "autograd.grad; use mesh.pp_split_backward=false or mesh.pp_schedule=1f1b"
            ),
            "mesh=shard2_pp2 mesh.reshard_after_forward=true mesh.pp_schedule=zbv microbatches=4 "
            "model=llama_nano": (
                "mesh.reshard_after_forward: true does not suit zbv: torch looks for the weights of a backward "
                "in two parts among those that FSDP has freed, and loses their gradients; use false, or "
                "mesh.pp_split_backward=false or mesh.pp_schedule=1f1b"
            ),
            "mesh=pp2 mesh.sync=last mesh.dp_replicate=2 microbatches=4 model=llama_nano": (
                "mesh.sync: last has no effect: schedules reduce gradients once, after all micro-batches; leave "
                "it at each"
            ),
            "mesh=pp2 mesh.dp_replicate=2 mesh.pp_schedule=zbv microbatches=4 model=llama_nano": (
                "mesh.dp_replicate: does not suit zbv: DDP sees no gradients that autograd.grad returns; use "
                "mesh.pp_split_backward=false or mesh.pp_schedule=1f1b, or mesh.dp_shard"
            ),
            "mesh=tp2 model=llama_nano model.n_kv_heads=1": "mesh.tp: must divide model.n_kv_heads, 1, got 2",
            "mesh=tp2 model=mlp model.hidden_width=511": "mesh.tp: must divide model.hidden_width, 511, got 2",
            "mesh=tp2 model=hf": "mesh.tp: model 'hf' has no tensor parallel plan, got 2; "
            "name linears with model.tp_column and model.tp_row, or use 1 without its options",
            "mesh.nodes=2 mesh.dp_shard=2": "mesh.nodes: this launcher runs on one node, got 2; "
            "use hydra/launcher=slurm",
            "sequence_length=1025": "sequence_length: must be at most 1024, the positions of 'gpt_nano', "
            "got 1025",
            "model.vocab_size=100": "data.path: bytes need model.vocab_size to be at least 256, got 100",
            "data.path=/nowhere": "data.path: cannot read '/nowhere': [Errno 2] No such file or directory: "
            "'/nowhere'",
            "data.path=/": "data.path: cannot read '/': it is no plain file",
            "data.path=/dev/null": "data.path: cannot read '/dev/null': it is no plain file",
            "data.path=/dev/zero": "data.path: cannot read '/dev/zero': it is no plain file",
            "data=tokens data.path=/dev/zero data.dtype=uint16": "data.path: cannot read '/dev/zero': it is no plain "
            "file",
            "data=tokens data.path=x.bin": "data.dtype: a raw file needs one of uint16, uint32, int32, int64, "
            "got null for 'x.bin'",
            "data=tokens data.path=x.bin data.dtype=float32": "data.dtype: must be one of uint16, uint32, "
            "int32, int64, got 'float32'",
            "data=tokens data.path=x.npy data.dtype=uint16": "data.dtype: must be null for .npy, which states "
            "its own, got 'uint16'",
            "data=tokens data.path=x.npy": "data.path: cannot read 'x.npy': [Errno 2] No such file or "
            "directory: 'x.npy'",
        }
    ),
)
def test_refuses_a_mesh_and_data_that_do_not_fit_the_model(line: str, message: str) -> None:
    assert refusal_of(line) == message


def test_refuses_a_token_file_for_another_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    np.save(path, np.full(500, 300, dtype=np.uint16))
    assert refusal_of(f"data=tokens data.path={path}") == (
        f"data.path: tokens must be in [0, 256), by model.vocab_size, got 300 in {str(path)!r}"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    rows(
        {
            "model.factory=nocolon": "model.factory: must be 'package.module:function', got 'nocolon'",
            "model.factory=no.such:f": "model.factory: cannot import 'no.such': No module named 'no'",
            f"model.factory={USER}:missing": f"model.factory: module '{USER}' has no function 'missing'",
            f"model.factory={USER}:FOREVER_S": f"model.factory: module '{USER}' has no function 'FOREVER_S'",
            f"model.factory={USER}:raises_when_made": f"model.factory: '{USER}:raises_when_made' raised "
            "RuntimeError: the weights are on another machine",
            f"model.factory={USER}:exits_when_made": f"model.factory: '{USER}:exits_when_made' exited with "
            "status 3",
            f"model.factory={USER}:hangs_when_made protocol.deadline_s=1": "model.factory: "
            f"'{USER}:hangs_when_made' did not return within 1 s",
            "model.factory=tests.harness.broken.raises:make": "model.factory: cannot import "
            "'tests.harness.broken.raises': ValueError: no data here",
            "model.factory=tests.harness.broken.exits:make": "model.factory: cannot import "
            "'tests.harness.broken.exits': SystemExit: no GPU here",
            f"model.factory={USER}:regression batch_size=4": "batch_size: has no effect, the factory brings "
            "its own inputs; leave it at 8",
            f"model.factory={USER}:regression sequence_length=64": "sequence_length: has no effect, the "
            "factory brings its own inputs; leave it at 128",
            f"model.factory={USER}:regression data=synthetic": "data: has no effect, the factory brings its "
            "own inputs; leave it at text, without a path",
            f"model.factory={USER}:regression data.path=/nowhere": "data: has no effect, the factory brings "
            "its own inputs; leave it at text, without a path",
            "model.factory=math:sqrt": "model.factory: 'math:sqrt' raised TypeError: math.sqrt() takes exactly "
            "one argument (0 given)",
            f"model.factory={USER}:draws_a_width": f"model.factory: '{USER}:draws_a_width' raised TypeError: "
            "draws_a_width() missing 1 required positional argument: 'width'; give it model.kwargs.width=…",
            "model.factory=builtins:dict": "model.factory: must return a module, or (module, example_inputs, "
            "loss_fn), got dict from 'builtins:dict'",
            f"model.factory={USER}:healthy model.dropout=0.1": "model.dropout: must be null, the factory takes no "
            "`dropout`, got 0.1",
            f"model.factory={USER}:healthy model.layers_fqn=blocks": "model.layers_fqn: must name a "
            "ModuleList, ModuleDict or Sequential of Stack, got 'blocks'; containers here: layers",
            f"model.factory={USER}:healthy mesh=tp2": f"mesh.tp: model '{USER}:healthy' has no tensor parallel "
            "plan, got 2; name linears with model.tp_column and model.tp_row, or use 1 without its options",
        }
    ),
)
def test_refuses_a_factory_of_no_use(line: str, message: str) -> None:
    assert refusal_of(f"model=python {line}") == message


@pytest.mark.parametrize(
    ("factory", "planned", "said"),
    [
        ("raises_when_called", "data=synthetic chunk=minimum", "ValueError: the width is odd"),
        ("loss_raises", "chunk=minimum", "ValueError: the width is odd"),
    ],
)
def test_a_model_that_raises_while_it_is_planned_is_refused(factory: str, planned: str, said: str) -> None:
    message = refusal_of(f"model=python model.factory={USER}:{factory} {planned}")
    assert message.startswith(f"model: raises when it is called on the meta device, to plan it: {said}")
    assert "(user_models.py, line " in message


def test_a_loss_that_asks_for_a_value_is_refused_with_its_line() -> None:
    message = refusal_of(f"model=python model.factory={USER}:loss_reads_a_value chunk=minimum")
    line = inspect.getsourcelines(user_models.loss_reads_a_value)[1]
    place = re.search(
        r"chunk: a pass of the model cannot be followed without data in user_models.py:(\d+), where it raises "
        "GuardOnDataDependentSymNode: ",
        message,
    )
    assert place is not None
    assert 0 < int(place[1]) - line < 20
    assert message.endswith("use chunk=none")


def test_an_operator_of_the_model_that_does_not_run_is_refused_with_its_line() -> None:
    message = refusal_of(
        f"model=python model.factory={USER}:mismatches_when_called data=synthetic chunk=minimum"
    )
    assert message.startswith("chunk: 'layers.0' cannot be followed without data in user_models.py:")
    assert "where it raises RuntimeError: " in message
    assert message.endswith("move the call out of the model, or use chunk=none")


_BY_NAME = (
    "plans inputs by position, but forward takes 'x' by name, one of them by name alone; let forward take all of "
    "them by position, or use"
)


@pytest.mark.parametrize(
    ("line", "message"),
    rows(
        {
            "chunk=minimum": f"chunk: {_BY_NAME} chunk=none",
            "shard=megatron mesh=tp2 model.tp_column=[layers.*.up] model.tp_row=[layers.*.down]": f"shard: {_BY_NAME} shard=none",
        }
    ),
)
def test_refuses_to_plan_inputs_without_a_position(line: str, message: str) -> None:
    assert refusal_of(f"model=python model.factory={USER}:takes_names {line}") == message


def test_nothing_of_a_model_runs_for_its_regions() -> None:
    found = experiment_of(f"model=python model.factory={USER}:raises_when_called data=synthetic ac=nested")
    assert found.model.name.endswith(":raises_when_called")


@pytest.mark.parametrize("data", ["data=text", "data=synthetic"])
@pytest.mark.parametrize("model", ["vit_nano", "evoformer", "unet"])
def test_models_that_draw_their_samples_have_regions_too(model: str, data: str) -> None:
    found = experiment_of(f"model={model} {data} ac=nested mesh=shard2 batch_size=2")
    assert found.model.name == model


@pytest.mark.parametrize(
    ("line", "message"),
    rows(
        {
            "sequence_length=64": "sequence_length: has no effect, 'vit_nano' draws samples of its own size; "
            "leave it at 128",
            "data.path=/nowhere": "data: has no effect, 'vit_nano' draws its own samples; use synthetic",
            "data=tokens data.path=x.npy": "data: has no effect, 'vit_nano' draws its own samples; "
            "use synthetic",
            "mesh=ddp2 batch_size=3": "batch_size: must be a multiple of the 2 data-parallel ranks of ddp2, "
            "got 3",
            "mesh=shard2_tp2 model.n_heads=1": "mesh.tp: must divide model.n_heads, 1, got 2",
            "model.vocab_size=100": "model.vocab_size: model=vit_nano has no such option; did you "
            "mean 'patch_size'? options: dropout, hidden_width, image_size, layers_fqn, n_classes, n_heads, n_layers, patch_size, width",
        }
    ),
)
def test_refuses_what_does_not_suit_images(line: str, message: str) -> None:
    assert refusal_of(f"model=vit_nano {line}") == message


@pytest.mark.parametrize(
    ("line", "message"),
    rows(
        {
            "model.config_class=GPT9Config": "model.config_class: must be a configuration class of "
            "transformers, such as GPT2Config, got 'GPT9Config'",
            "model.config_class=Wav2Vec2Config": "model.config_class: must be of a model with one of the heads "
            "causal, masked, seq2seq, speech, image, got Wav2Vec2Config; use another, such as GPT2Config",
            "model.dropout=0 model.overrides={attn_pdrop:0.1}": "model.overrides.attn_pdrop: every dropout of "
            "the model is set by model.dropout=0.0; set that, or leave it at null",
            "model.layers_fqn=layers": "model.layers_fqn: must name a ModuleList, ModuleDict or Sequential of "
            "GPT2LMHeadModel, got 'layers'; containers here: transformer.h",
        }
    ),
)
def test_refuses_a_configuration_of_no_use(line: str, message: str) -> None:
    assert refusal_of(f"model=hf {line}") == message


def test_suggests_the_field_of_a_configuration_class() -> None:
    message = refusal_of("model=hf model.overrides={n_layr:3}")
    assert message.startswith(
        "model.overrides.n_layr: GPT2Config has no such field; did you mean 'n_layer'? "
    )


def test_refuses_more_ranks_than_the_cores_can_bear() -> None:
    most = RANKS_PER_CORE * len(os.sched_getaffinity(0))
    line = f"mesh.device=cpu mesh.dp_shard={2 * most} batch_size={2 * most}"
    assert refusal_of(line) == (
        f"mesh: shard{2 * most} needs {2 * most} ranks on this node, at most {most} fit its cores "
        "(8 a core); use a smaller mesh"
    )


def test_refuses_cuda_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refusal_of("mesh.device=cuda") == (
        "mesh.device: cuda was asked for, but this torch sees no CUDA device; use cpu"
    )


def test_refuses_more_ranks_than_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_DRIVERS", ("/dev/null",))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert refusal_of("mesh=shard2 mesh.device=auto") == "mesh: shard2 needs 2 CUDA devices a node, found 1"


@pytest.mark.parametrize(
    ("line", "refusal"),
    [
        pytest.param(
            "model=moe_nano",
            "chunk: 'layers.0.feed_forward' calls aten.nonzero.default in ",
            id="a shape that depends on data",
        ),
        pytest.param(
            "model=mlp ac.module_classes=[Linear]",
            "ac: the region around 'layers.0.up' would never run, because chunk replaces the forward of its "
            "block; put regions around whole blocks, or use chunk=none",
            id="regions inside of blocks",
        ),
    ],
)
def test_refuses_chunks_of_one_plan_before_it_is_made(line: str, refusal: str) -> None:
    sizes = "model.n_layers=1 sequence_length=8 batch_size=2"
    assert refusal_of(f"{line} {sizes} ac=budget ac.fraction=0.5 chunk=budget").startswith(refusal)


_TIGHT = "chunk=budget chunk.fraction=0.01"


def _on_cuda(line: str) -> Experiment:
    """Return the experiment of a command of a login node, whose ranks will have a GPU."""
    return materialise(experiment_fields(composed([*line.split(), "mesh.device=cuda"])))


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("model=mlp chunk=budget chunk.fraction=0.9", id="a budget"),
        pytest.param(
            "model=mlp chunk=minimum mesh=ddp2 dtype=bf16_mixed", id="the smallest peak, in half precision"
        ),
        pytest.param("model=mlp ac=budget ac.fraction=0.9 chunk=budget", id="one budget of AC and chunks"),
        pytest.param("shard=cheapest mesh=tp2 dtype=bf16_mixed", id="sharding"),
    ],
)
def test_no_tensor_of_the_driver_pretends_to_be_on_a_gpu(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    devices: set[str] = set()
    cast = Shadow.on

    def noted(shadow: Shadow, device: torch.device) -> Shadow:
        devices.add(device.type)
        assert device.type == "cpu"  # where there is no GPU, a backward on it ends the process
        return cast(shadow, device)

    monkeypatch.setattr(Shadow, "on", noted)
    Preflight().check(_on_cuda(f"{line} model.n_layers=1 sequence_length=8 batch_size=4"))
    assert devices == {"cpu"}


def test_a_budget_of_a_gpu_is_left_to_its_ranks() -> None:
    line = f"model=mlp model.n_layers=1 sequence_length=8 batch_size=2 {_TIGHT}"
    assert refusal_of(line).startswith("chunk.fraction: no plan keeps activations within ")
    Preflight().check(_on_cuda(line))


@pytest.mark.parametrize("view", ["regions", "memory"])
def test_a_view_that_nothing_has_is_refused_before_anything_is_built(view: str) -> None:
    built: list[object] = []
    checks = Preflight(built=lambda *asked: built.append(asked), shown=view)
    with pytest.raises(ConfigError) as caught:
        checks.check(experiment_of("model=mlp ac=budget ac.fraction=0.9"))
    assert str(caught.value) == (
        f"show: ac=budget, chunk=none, shard=none have no view '{view}'; views: file, plan, torch_remat"
    )
    assert built == []


def test_a_view_of_chunks_says_whose_kernels_it_is_planned_with() -> None:
    line = "model=mlp model.n_layers=1 sequence_length=8 batch_size=2 chunk=budget chunk.fraction=0.9"
    here, there = (show(each, "chunks") for each in (experiment_of(line), _on_cuda(line)))
    assert there == (
        f"# planned with the kernels of the CPU; ranks plan with those of CUDA, whose bytes may differ\n{here}"
    )


def test_a_model_of_any_size_is_checked_without_its_memory() -> None:
    Preflight().check(experiment_of("model=llama_1b ac=full"))  # 4.9 GB of parameters


def test_a_constructor_that_reads_values_is_checked_for_real() -> None:
    assert point_of(f"model=python model.factory={USER}:reads_values ac=full").refusal is None


def test_example_inputs_leave_the_batch_to_the_mesh_where_the_default_does_not_fit() -> None:
    line = f"model=python model.factory={USER}:regression mesh.dp_replicate=3 batch_size=3"
    assert point_of(line).refusal is None


def test_the_alarm_of_a_factory_leaves_no_trace() -> None:
    before = signal.getsignal(signal.SIGALRM)
    for factory in ("healthy", "hangs_when_made"):
        point_of(f"model=python model.factory={USER}:{factory} protocol.deadline_s=1")
        assert signal.getsignal(signal.SIGALRM) is before
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_factory_is_checked_outside_the_main_thread_too() -> None:
    with ThreadPoolExecutor(max_workers=1) as threads:
        check_there = threads.submit(
            Preflight().check, experiment_of(f"model=python model.factory={USER}:healthy")
        )
    assert check_there.result() is None


def test_a_termination_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def terminated() -> None:
        raise Terminated(143)

    experiment = experiment_of(f"model=python model.factory={USER}:healthy")
    monkeypatch.setattr(user_models, "healthy", terminated)
    with pytest.raises(Terminated):
        Preflight().check(experiment)


def test_a_factory_without_a_name_for_its_blocks_is_checked_too() -> None:
    assert point_of(f"model=python model.factory={USER}:regression model.layers_fqn=''").refusal is None


def test_the_global_state_of_torch_is_left_alone() -> None:
    before = torch.get_rng_state()
    Preflight().check(experiment_of("ac=full model.dropout=0.1"))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_device() == torch.device("cpu")


def test_a_defect_of_the_program_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(*_args: object, **_options: object) -> None:
        raise RuntimeError("a defect")

    experiment = experiment_of("")
    monkeypatch.setattr(ModelSpec, "check", defect)
    with pytest.raises(RuntimeError, match="a defect"):
        Preflight().check(experiment)


@pytest.mark.parametrize(
    ("line", "message"),
    rows(
        {
            "model=mlp model.width=4294967296 model.hidden_width=4294967296": "model: a tensor of the step has "
            "more bytes than 64 bits can count (Storage size calculation overflowed with sizes="
            "[4294967296, 4294967296]); make batch_size, sequence_length or the model smaller",
            "model=mlp sequence_length=131072": "data.path: 'the shipped text' holds 28721 tokens; "
            "sequence_length 131072 needs one more",
        }
    ),
)
def test_sizes_that_cannot_be_run_are_refused(line: str, message: str) -> None:
    assert refusal_of(line) == message


def test_a_plan_needs_no_data() -> None:
    asked = Preflight(lambda _: True, reads_data=False)
    for line in ("sequence_length=131072", "data=tokens data.path=/nowhere/tokens.npy"):
        asked.check(materialise(experiment_fields(composed(["model=mlp", *line.split()]))))


def test_a_defect_of_the_program_refuses_one_point_of_a_sweep(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def defect(*_args: object, **_options: object) -> None:
        raise RuntimeError("no pickle")

    monkeypatch.setattr(ModelSpec, "check", defect)
    refused = point_of("model=mlp", is_swept=True)
    assert isinstance(refused.refusal, UnplannedError)  # so that the command ends with 1
    assert str(refused.refusal) == (
        "acbench: a defect here kept this point from being planned: RuntimeError: no pickle; "
        "report it with the traceback on stderr"
    )
    assert "in defect" in capsys.readouterr().err


def test_a_point_that_is_refused_says_what_it_asks_for_as_any_other() -> None:
    found = point_of(f"model=python model.factory={USER}:regression ac=full ac.layers_fqn=no.such.blocks")
    assert found.refusal is not None
    assert "tp_summed" not in found.resolved["model"]  # it has its default


def test_a_command_makes_a_model_once_for_all_that_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"model=python model.factory={USER}:healthy ac=full seed={seed}" for seed in range(3)]
    experiments = [experiment_of(line) for line in lines]
    made = _count_made(monkeypatch, "healthy")
    preflight = Preflight()
    for experiment in experiments:
        preflight.check(experiment)
    assert len(made) == 1
    Preflight().check(experiments[0])
    assert len(made) == 2


@pytest.mark.parametrize("other", ["ac=none", "ac=full wrap_order=call_site", "ac=full model.vocab_size=257"])
def test_another_model_or_variant_is_checked_too(monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    experiments = [
        experiment_of(f"model=python model.factory={USER}:healthy {line}") for line in ("ac=full", other)
    ]
    made = _count_made(monkeypatch, "healthy")
    preflight = Preflight()
    for experiment in experiments:
        preflight.check(experiment)
    assert len(made) == 2


def test_what_is_refused_once_is_refused_as_often_as_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = experiment_of(f"model=python model.factory={USER}:healthy")

    def fails() -> nn.Module:
        made.append(None)
        raise RuntimeError("not today")

    made: list[None] = []
    monkeypatch.setattr(user_models, "healthy", fails)
    preflight = Preflight()
    for _ in range(3):
        with pytest.raises(
            ConfigError, match=r"^model\.factory: .*:healthy' raised RuntimeError: not today$"
        ):
            preflight.check(experiment)
    assert len(made) == 2  # on the meta device, and for real


def _count_made(monkeypatch: pytest.MonkeyPatch, factory: str) -> list[None]:
    """Return a list that grows by one whenever `factory` makes a model."""
    original = getattr(user_models, factory)
    made: list[None] = []

    def counted() -> nn.Module:
        made.append(None)
        model: nn.Module = original()
        return model

    monkeypatch.setattr(user_models, factory, counted)
    return made
