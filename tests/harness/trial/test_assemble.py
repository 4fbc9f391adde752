# ruff: noqa: E501 (one line a message)
"""What a user's factory makes is trained as it is, or refused with a sentence."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from harness.errors import ConfigError
from harness.experiment.mesh import Mesh
from harness.measure.environment import describe
from harness.measure.step import instrument
from harness.models import ModelSpec
from harness.models.base import LanguageModelSpec
from harness.models.python import PythonSpec
from harness.records.record import Ending, Identity, Record, build
from harness.trial import run as trial_run
from harness.trial.assemble import Assembled, assemble
from harness.trial.batches import batches
from harness.trial.build import Build
from harness.trial.trial_plan import TrialPlan
from strategies import chunk_variants
from strategies.ac.full import Full
from strategies.chunk import ChunkPlan
from tests.harness.composing import experiment_of, refusal_of, rows
from tests.parity import cases
from tests.rank_pool import RankPool

RunTrial = Callable[[str], Record]

_CPU = torch.device("cpu")
_USER = "model=python model.layers_fqn=blocks model.factory=tests.harness.unusual_models"
_SHORT = "protocol=smoke protocol.timed_pairs=0 protocol.parity_steps=2"
_CHUNKED = (
    "model=mlp model.n_layers=1 model.width=4 model.hidden_width=4 data=synthetic batch_size=2 "
    "sequence_length=32 chunk=minimum"
)
"""Its logits are so large that the loss joins the plan."""


class _Alone:
    """What a rank sees of a trial that reports to nobody."""

    rank, local_rank, world_size, device = 0, 0, 1, _CPU

    def __init__(self, trial_dir: Path) -> None:
        self.trial_dir = trial_dir

    def phase(self, name: str) -> None:
        pass

    def progress(self, done: int, total: int) -> None:
        pass

    def keep(self, measured: dict[str, Any]) -> None:
        pass


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunTrial:
    """Return a function that runs a trial in this process, under its own allocator."""
    monkeypatch.setattr(trial_run, "install", lambda: None)
    monkeypatch.setattr(trial_run, "allocator_truth", lambda *_: None)
    monkeypatch.setattr(trial_run, "describe", lambda *_: _environment())

    def run(line: str) -> Record:
        experiment = experiment_of(f"{_SHORT} {_USER}:{line}")
        context: Any = _Alone(tmp_path)
        result = json.loads(json.dumps(trial_run.run(TrialPlan(experiment=experiment), context)))
        identity = Identity(
            trial_id="0" * 12, environment_id="0" * 12, name="odd", experiment=experiment.to_dict()
        )
        ending = Ending(status="ok", error=None, started_at="2026-01-01", finished_at="2026-01-01")
        return build(identity, ending, [result])

    return run


@cache
def _environment() -> dict[str, Any]:
    return describe(_CPU)


def made(line: str) -> Assembled:
    experiment = experiment_of(f"{_USER}:{line}")
    batch = experiment.model.fixed_batch()
    assert batch is not None
    return assemble(experiment, _CPU, None, batch.to(_CPU))


NEUTRAL: Mapping[str, Mapping[str, int]] = {
    "half_linears ac=full": {"float32": 32, "bfloat16": 144},
    "loss_reads_model_and_example ac=full seed=3": {"float32": 144},
    "reads_a_tensor_of_the_file ac=full": {"float32": 144},
    "all_half ac=selective_op": {"bfloat16": 144},
    "fourier ac=full": {"complex64": 16, "float32": 144},
    "doubles ac=nested": {"float64": 144},
    "quantised ac=full": {"int8": 128, "float32": 16},
    "frozen_backbone ac=full": {"float32": 232},
    "overwrites_its_input ac=full": {"float32": 144},
    "by_name ac=full": {"float32": 144},
    "with_a_gap ac=nested": {"float32": 144},
    "input_with_gradient ac=full": {"float32": 144},
    "reads_arrays ac=offload": {"float32": 144},
    "sparse_embedding ac=full optimizer=sgd": {"float32": 272},
    "batch_function ac=full batch_size=6": {"float32": 144},
    "dataset ac=full batch_size=3": {"float32": 144},
    "odd_outputs ac=full": {"float32": 144},
    "normed_weights ac=offload": {"float32": 152},
    "sized ac=full model.kwargs={width:16}": {"float32": 544},
    "any_argument ac=full model.kwargs={depth:3}": {"float32": 216},
}


@pytest.mark.parametrize("line", NEUTRAL)
def test_an_unusual_model_is_trained_as_it_was_made(trial: RunTrial, line: str) -> None:
    record = trial(line)
    assert record.verdict == "neutral", [*record.parity.differences()] if record.parity else None
    assert record.trained is not None
    assert record.trained.elements == NEUTRAL[line]
    assert record.trained.changed == {}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_variant_that_trains_nothing_differs(trial: RunTrial) -> None:
    line = "sized ac=python ac.factory=tests.harness.unusual_models:reentrant"
    record = trial(line)
    assert record.verdict == "differs"
    assert record.parity is not None
    first = record.parity.first
    assert first is not None
    assert (first.part, first.name, first.actual) == ("gradients", "blocks.1.0.bias", "None")
    assert record.memory is not None
    assert record.memory.saved_bytes == 0


def test_the_outputs_of_odd_containers_are_not_saved(trial: RunTrial) -> None:
    odd, plain = trial("odd_outputs ac=none").memory, trial("sized ac=none").memory
    assert odd is not None
    assert plain is not None
    loss_reads = 4 * 8 * 4  # the product that the loss squares; the mean keeps nothing
    assert odd.saved_bytes <= plain.saved_bytes + 2 * loss_reads


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param("quantised", {"whole": "int8", "scale": "float32", "offset": "float64"}, id="own"),
        pytest.param("all_half dtype=fp32", {"0.weight": "float32"}, id="wider"),
        pytest.param("sized dtype=bf16", {"0.weight": "bfloat16"}, id="narrower"),
        pytest.param("fourier dtype=fp32", {"filter": "complex64"}, id="complex numbers of that width"),
    ],
)
def test_dtype_acts_where_it_is_set(line: str, expected: dict[str, str]) -> None:
    block = made(line).model.get_submodule("blocks.0")
    state = {**dict(block.named_parameters()), **dict(block.named_buffers())}
    assert {name: str(state[name].dtype).removeprefix("torch.") for name in expected} == expected


def test_the_record_says_what_was_cast() -> None:
    assert made("sized dtype=bf16").trained.changed == {"parameters from float32 to bfloat16": 4}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("ac=full", "0 1 2 3"),
        ("ac=selective_layer", "1 3"),
        ("ac=selective_layer ac.layers_fqn=blocks ac.ac_freq=4", "3"),
        ("ac=nested", "0 1 2 3"),
        ("ac=nested ac.labels={blocks.2:[0]}", "2"),
        ("ac=full wrap_order=call_site", "0 1 2 3"),
        ("ac=none", "0 1 2 3"),
    ],
)
def test_blocks_that_are_recomputed_are_known(options: str, expected: str) -> None:
    found = made(f"sized model.kwargs={{depth:4}} {options}").checkpointed
    assert list(found) == [f"blocks.{number}" for number in expected.split()]


def test_each_step_gets_an_example_of_its_own() -> None:
    batch = experiment_of(f"{_USER}:input_with_gradient").model.fixed_batch()
    assert batch is not None
    one, other = batch.to(_CPU), batch.to(_CPU)
    one.inputs[0].data.zero_()
    assert other.inputs[0].requires_grad
    assert other.inputs[0].abs().sum() > 0


ON_TWO_RANKS = [
    "half_linears ac=full mesh=shard2",
    "fourier ac=full mesh=shard2",
    "fourier ac=full mesh=ddp2",
    "frozen_backbone model.kwargs={rate:0.0} ac=full mesh=ddp2",
    "sparse_embedding ac=full mesh=ddp2 optimizer=sgd",
    "sized model.kwargs={rate:0.0} ac=full mesh=shard2 model.split_example=true",
    "by_name model.kwargs={rate:0.0} ac=full mesh=shard2",
    "batch_function model.kwargs={rate:0.0} ac=full mesh=ddp2",
    "sized model.kwargs={rate:0.0} ac=full mesh=shard2 mesh.sync=last model.split_example=true microbatches=2",
    "dataset model.kwargs={rate:0.0} ac=full mesh=shard2",
]


@pytest.mark.parametrize("line", ON_TWO_RANKS)
def test_ranks_train_what_one_rank_trains(pool2: RankPool, line: str) -> None:
    case = experiment_of(f"{_SHORT} {_USER}:{line} optimizer=sgd")
    one, other = pool2.run(cases.parity, case)
    assert [*one.differences(), *other.differences()] == []
    alone = cases.parity(0, replace(case, mesh=Mesh(device="cpu"), model=_whole(case.model)))
    mean = [(first + second) / 2 for first, second in zip(one.losses, other.losses, strict=True)]
    assert mean == pytest.approx(alone.losses, rel=1e-2)


def _whole(model: ModelSpec) -> ModelSpec:
    return replace(model, split_example=False) if isinstance(model, PythonSpec) else model


@pytest.mark.parametrize("mesh", [pytest.param("ddp2", marks=pytest.mark.matrix), "shard2"])
def test_a_plan_that_includes_the_loss_is_compared_but_for_outputs(pool2: RankPool, mesh: str) -> None:
    case = cases.experiment(
        variant="none", chunk="minimum", mesh=cases.MESHES[mesh], parity_steps=2, sequence_length=32
    )
    assert isinstance(case.model, LanguageModelSpec)
    case = replace(case, model=replace(case.model, vocab_size=2_048))
    for found in pool2.run(cases.parity, case):
        assert [*found.differences()] == []
        assert (found.absent, found.level) == (("outputs",), "tolerance")


def test_models_that_are_alike_share_the_plan_of_their_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = experiment_of(f"{_CHUNKED} optimizer=sgd")
    full = Full(layers_fqn=plain.model.layers_fqn)
    alike = [plain, replace(plain, optimizer="adamw"), replace(plain, ac=full)]
    batch = batches(alike[0], _CPU, 0)(0)
    made = mock.Mock(side_effect=ChunkPlan.make)
    monkeypatch.setattr(ChunkPlan, "make", made)
    build = Build()
    models, losses, counts = [], [], []
    for case in alike:
        trainee = assemble(case, _CPU, None, batch, build=build)
        assert trainee.has_loss
        losses.append(trainee.forward(batch)[1].item())
        counts.append(made.call_count)
        models.append(weakref.ref(trainee.model))
        made.reset_mock(side_effect=False, return_value=False)  # it remembers what it was called with
        del trainee
        gc.collect()
    assert counts == [1, 0, 1]
    assert losses[0] == losses[1] == pytest.approx(losses[2], rel=1e-6)
    assert [model() for model in models] == [None] * 3  # a plan holds no model


def test_what_loops_run_again_is_what_the_step_has_beyond_the_twins() -> None:
    twin = experiment_of(_CHUNKED.removesuffix(" chunk=minimum"))
    batch = batches(twin, _CPU, 0)(0)
    chunked = replace(twin, chunk=chunk_variants["minimum"]())
    plain, loops = (instrument(assemble(case, _CPU, None, batch), batch).work for case in (twin, chunked))
    of_step, of_twin = (work.step_flops for work in (loops, plain))
    assert plain.recomputed_flops == 0
    assert loops.recomputed_flops == of_step - of_twin > 0


def test_ranks_and_steps_read_different_samples() -> None:
    experiment = experiment_of(f"{_USER}:batch_function mesh=ddp2")
    first, second = (batches(experiment, _CPU, rank) for rank in range(2))
    rows = [each.inputs[0] for each in (first(0), second(0), first(1))]
    assert [len(each) for each in rows] == [4, 4, 4]
    assert not torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])
    assert torch.equal(rows[0], first(0).inputs[0])


_WHERE = "model.factory: "
REFUSED = {
    "fourier dtype=bf16": "dtype: parameter 'blocks.0.filter' is complex64, which bf16 cannot hold without loss; "
    "leave dtype out, to train the model as it was made",
    "fourier dtype=bf16_mixed": "dtype: parameter 'blocks.0.filter' is complex64, which bf16_mixed cannot hold "
    "without loss; leave dtype out, to train the model as it was made",
    "doubles dtype=fp32": "dtype: parameter 'blocks.0.0.weight' is float64, which fp32 cannot hold without loss; "
    "leave dtype out, to train the model as it was made",
    "quantised dtype=fp32": "dtype: parameter 'blocks.0.whole' is int8, which fp32 cannot hold without loss; "
    "leave dtype out, to train the model as it was made",
    "quantised dtype=fp32 model.cast_buffers=true": "dtype: parameter 'blocks.0.whole' is int8, which fp32 "
    "cannot hold without loss; leave dtype out, to train the model as it was made",
    "sparse_embedding": "optimizer: adamw takes no sparse gradients, and '0' makes sparse gradients; use "
    "optimizer=sgd",
    "sparse_embedding optimizer=sgd mesh=shard2": "mesh.dp_shard: '0' makes sparse gradients, which FSDP cannot "
    "reduce; use sparse=False or mesh=ddp2",
    "half_linears mesh=shard2 mesh.fsdp=fsdp1": "mesh.fsdp: 'blocks.0' holds parameters of torch.float32 and "
    "torch.bfloat16, and a unit of FSDP1 has one dtype; use mesh.fsdp=fsdp2",
    "quantised mesh=shard2": "mesh.dp_shard: 'blocks.0' holds parameters of torch.int8 and torch.float32, and a "
    "unit of FSDP2 has one dtype; put them into modules of their own, or use mesh=ddp2",
    "one_weight mesh=shard2": "mesh.dp_shard: 'blocks.1.weight' is a parameter of 'blocks.0' too, and units of FSDP2 "
    "share none; tie weights inside of one block, or use mesh=ddp2",
    "not_sized": f"{_WHERE}parameter 'blocks.0.weight' has no shape before the first forward; make it with its "
    "sizes",
    "one_for_all": f"{_WHERE}'tests.harness.unusual_models:one_for_all' returns the same module each time; each "
    "model of a trial is a new one: make it inside of the function",
    "one_module_for_all": f"{_WHERE}'tests.harness.unusual_models:one_module_for_all' returns the same module each "
    "time; each model of a trial is a new one: make it inside of the function",
    "input_with_history": f"{_WHERE}inputs[0] has a history that ends outside of the step; give "
    "`.detach().requires_grad_()`",
    "short_batches": f"{_WHERE}every tensor of a batch of the factory needs a row for each of 8 samples, but "
    "targets has shape (1,)",
    "a_tensor_for_inputs": f"{_WHERE}the second of three must be a tuple or a mapping of inputs, a batch function "
    "or a dataset, got Tensor",
    "wrong_names": f"{_WHERE}its inputs do not fit forward: missing a required argument: 'x'",
    "sized model.kwargs={widht:4}": "model.kwargs.widht: 'tests.harness.unusual_models:sized' has no such "
    "argument; did you mean 'width'? it takes: width, depth, rate",
    "sized model.kwargs={dropout:0.5}": "model.kwargs.dropout: is set by model.dropout; set that",
    "whole_targets model.split_example=true mesh=ddp2": "model.split_example: the loss reads 'targets', which has "
    "a row for each sample of the whole example; give a batch function or a dataset with targets instead",
    "sized model.split_example=true mesh=ddp2 mesh.dp_replicate=3 batch_size=9": "model.split_example: the "
    "example has 4 rows, which 3 data-parallel ranks do not divide; give another example, or leave it at false",
    "sized microbatches=2": "microbatches: must be 1 for an example that nobody may cut, got 2; use "
    "model.split_example=true where a row of every tensor is a sample, or let the factory give a function of the "
    "batch size",
    "sized model.split_example=true microbatches=8": "microbatches: must divide the 4 rows of the example that a "
    "rank has, got 8; give another example, or use 1",
    "batch_function model.split_example=true": "model.split_example: has no effect: the factory gives no example "
    "inputs; leave it at false",
}


@pytest.mark.parametrize(("line", "message"), rows(REFUSED))
def test_what_cannot_be_trained_is_refused(line: str, message: str) -> None:
    assert refusal_of(f"{_USER}:{line}") == message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        pytest.param(
            "yields_outputs",
            "model: outputs[1] is a generator, which cannot be read twice; return a list, a tuple or a dictionary",
            id="an iterator",
        ),
        pytest.param(
            "many_losses",
            "model.factory: loss_fn must return a real scalar tensor, got a (8,) torch.float32",
            id="a loss that is no scalar",
        ),
        pytest.param(
            "nothing_to_train",
            "model: the loss depends on no parameter that requires a gradient",
            id="nothing to train",
        ),
    ],
)
def test_what_a_step_shows_ends_the_trial_with_a_sentence(trial: RunTrial, line: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        trial(line)
    assert str(error.value) == message
