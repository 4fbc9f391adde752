"""What is predicted of a step is what is measured of it, to the byte."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from harness.errors import ConfigError
from harness.predict import fake_rank
from harness.predict.fake_rank import step_log
from harness.predict.prediction import predict
from harness.predict.step_log import fake_step
from strategies.step.operator_mode import OperatorMode
from strategies.tracing.balanced_routing import BALANCED
from tests.harness.composing import experiment_of, lines
from tests.harness.predict.measured_step import MeasuredStep, measured_step, step_of_rank
from tests.rank_pool import RankPool

_SMALL = "data=synthetic batch_size=2 model.n_layers=2 model.width=32 model.hidden_width=64"
_TOKENS = f"{_SMALL} sequence_length=16"
_ONE_RANK = {
    "full AC": "model=gpt_nano ac=full",
    "without dropout, by another kernel": "model=llama_nano ac=selective_op model.dropout=0",
    "offloading, and SGD": "model=llama_nano ac=offload optimizer=sgd",
    "nested, in half precision": "model=llama_nano ac=nested dtype=bf16",
    "micro-batches": "model=llama_nano ac=full microbatches=2",
}
_MORE_OF_ONE_RANK = {
    "plain": "model=gpt_nano",
    "every second layer": "model=llama_nano ac=selective_layer",
    "images": "model=vit_nano ac=full",
    "around the call": "model=gpt_nano ac=full wrap_order=call_site",
    "chunks": "model=gpt_nano chunk=budget chunk.fraction=0.6",
    "chunks under full AC": "model=gpt_nano chunk=minimum ac=full",
    "micro-batches in chunks": "model=gpt_nano chunk=budget chunk.fraction=0.8 microbatches=2",
    "four micro-batches, plain": "model=gpt_nano batch_size=4 microbatches=4",
    "four micro-batches, offloading": "model=llama_nano ac=offload batch_size=4 microbatches=4",
}


@pytest.mark.parametrize("line", lines(_ONE_RANK, _MORE_OF_ONE_RANK))
def test_one_rank_is_predicted_to_the_byte(line: str) -> None:
    size = _TOKENS if "vit" not in line else _SMALL
    experiment = experiment_of(f"{size} {line}")
    predicted, measured = fake_step(step_log(experiment)), measured_step(experiment)
    assert (predicted.memory, predicted.work) == (measured.memory, measured.work)
    assert predicted.observation == measured.observation


@pytest.mark.parametrize("ac", ["none", "nested", "full", "offload"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_are_predicted_to_the_byte(kind: str, ac: str) -> None:
    factory = "model=python model.factory=tests.harness.unusual_models:recurrent model.layers_fqn=blocks"
    experiment = experiment_of(f"{factory} +model.kwargs.kind={kind} ac={ac}")
    predicted, measured = fake_step(step_log(experiment)), measured_step(experiment)
    assert (predicted.memory, predicted.work) == (measured.memory, measured.work)


_TWO_RANKS = {
    "replicas": "model=gpt_nano mesh=ddp2 ac=full",
    "shards on the host, and offloading": "model=llama_nano mesh=shard2 mesh.cpu_offload=true ac=offload",
    "tensors": "model=gpt_nano mesh=tp2 ac=full",
    "shards that wait for the last micro-batch": (
        "model=llama_nano mesh=shard2 mesh.sync=last microbatches=2 batch_size=4 ac=full"
    ),
}
_MORE_OF_TWO_RANKS = {
    "shards": "model=llama_nano mesh=shard2 ac=selective_op",
    "shards by FSDP1": "model=llama_nano mesh=shard2 mesh.fsdp=fsdp1 ac=full",
    "AC around shards, in half precision": (
        "model=llama_nano mesh=shard2 wrap_order=outside_fsdp ac=full dtype=bf16_mixed"
    ),
}
_MORE_OF_TWO_RANKS |= {
    f"{mesh} after {sync} of three micro-batches": (
        f"model=gpt_nano mesh={mesh} mesh.sync={sync} microbatches=3 batch_size=6 ac=none"
    )
    for mesh in ("ddp2", "shard2", "shard2 mesh.fsdp=fsdp1", "shard2 mesh.cpu_offload=true")
    for sync in ("each", "last")
}
_FOUR_RANKS = {
    "replicas of shards": "model=gpt_nano mesh=hsdp2x2 ac=full batch_size=4",
    "shards of tensors": "model=llama_nano mesh=shard2_tp2 ac=selective_layer",
    "replicas of shards after the last micro-batch": (
        "model=gpt_nano mesh=hsdp2x2 ac=full mesh.sync=last microbatches=2 batch_size=8"
    ),
}
_VIEWS = pytest.mark.filterwarnings(
    "ignore:FSDP2-wrapped module:UserWarning"
)  # outputs that are, as in a trial


@pytest.mark.parametrize("line", lines(_TWO_RANKS, _MORE_OF_TWO_RANKS))
def test_ranks_are_predicted_to_the_byte(line: str, pool2: RankPool) -> None:
    _compare(line, pool2)


@pytest.mark.parametrize("line", lines({}, _FOUR_RANKS))
def test_meshes_of_two_dimensions(line: str, pool4: RankPool) -> None:
    _compare(line, pool4)


def _compare(line: str, pool: RankPool) -> None:
    experiment = experiment_of(f"{_TOKENS} {line}")
    predicted, measured = fake_step(step_log(experiment)), pool.run(step_of_rank, experiment)[0]
    assert (predicted.memory, predicted.work) == (measured.memory, measured.work)
    assert predicted.observation == measured.observation


_MOE = (
    "model=moe_nano data=synthetic batch_size=2 sequence_length=17 model.n_layers=2 model.width=32 "
    "model.hidden_width=64"
)


class _Dealt(OperatorMode):
    """Deals choices to experts in turns, behind the back of every meter."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if func is torch.ops.aten.topk.default:
            with _disable_current_modes():
                turns = torch.arange(result[1].numel()) % args[0].size(-1)
                result[1].copy_(turns.view(result[1].shape))
        return result


def _with_dealt_tokens(rank: int, line: str) -> MeasuredStep:
    with _Dealt():
        experiment = experiment_of(line)
        return (
            measured_step(experiment) if experiment.mesh.world_size == 1 else step_of_rank(rank, experiment)
        )


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("ac=none", marks=pytest.mark.matrix, id="plain"),
        pytest.param("ac=full", id="full AC"),
        pytest.param("ac=selective_op", marks=pytest.mark.matrix, id="selective AC"),
        pytest.param("ac=nested model.n_experts=3", id="nested, shares that differ by a token"),
        pytest.param("ac=offload dtype=bf16", marks=pytest.mark.matrix, id="offloading, in half precision"),
    ],
)
def test_equal_shares_are_predicted_to_the_byte(line: str) -> None:
    predicted = fake_step(step_log(experiment_of(f"{_MOE} {line}")))
    measured = _with_dealt_tokens(0, f"{_MOE} {line}")
    assert (predicted.memory, predicted.work) == (measured.memory, measured.work)
    assert predicted.assumes == (BALANCED,)


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", ["ddp2", "shard2", "tp2"])
def test_ranks_with_equal_shares(mesh: str, pool2: RankPool) -> None:
    line = f"{_MOE} mesh={mesh} ac=full"
    predicted = fake_step(step_log(experiment_of(line)))
    measured = pool2.run(_with_dealt_tokens, line)[0]
    assert (predicted.memory, predicted.work) == (measured.memory, measured.work)


def test_a_record_says_what_it_assumes() -> None:
    found = predict(experiment_of(f"{_MOE} ac=none model.n_layers=1"))
    assert found.assumes == (BALANCED,)
    assert found.note is not None
    assert found.note.endswith(f"predicted assuming that {BALANCED}")


@pytest.mark.parametrize(
    ("line", "device", "message"),
    [
        pytest.param(
            "model=python model.factory=tests.harness.user_models:selects_by_a_mask",
            "cpu",
            "model: aten.nonzero.default gives a shape that depends on data, which a prediction has not "
            r"\(in 'SelectsByAMask', user_models.py, line \d+\); a trial measures it",
            id="rows by a mask",
        ),
        pytest.param(
            f"{_TOKENS} model=mlp compile=inductor",
            "cpu",
            "compile: kernels that Inductor generates have no tensors without data to run on; predict "
            "compile=aot_eager, or run the trial, which measures",
            id="generated kernels",
        ),
        pytest.param(
            f"{_TOKENS} model=mlp",
            "cuda",
            "device: must be one of cpu, got 'cuda': torch ends .*",
            id="a GPU",
        ),
    ],
)
def test_what_cannot_be_predicted_is_refused(line: str, device: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        predict(experiment_of(line), device=device)


def test_a_factory_that_reads_a_value_is_refused_with_its_line() -> None:
    line = "data=synthetic model=python model.factory=tests.harness.user_models:reads_values"
    message = (
        r"^model\.factory: 'tests\.harness\.user_models:reads_values' reads values of tensors, which a "
        r"prediction has not: aten\._local_scalar_dense\.default \(user_models\.py, line \d+, in .*\); "
        "take them from Python's own numbers, or run the trial, which measures$"
    )
    with pytest.raises(ConfigError, match=message):
        fake_step(step_log(experiment_of(line)))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param("example", 4 << 22, id="an example"),
        pytest.param("view", 4 << 22, id="a view, with all that it is of"),
        pytest.param("samples", (8 << 22) + 8 * 4, id="samples"),
    ],
)
def test_a_factory_with_inputs_takes_no_memory(given: str, expected: int) -> None:
    factory = "tests.harness.user_models:too_large_for_any_machine"
    line = f"model=python model.factory={factory} ++model.kwargs.given={given} optimizer=sgd"
    memory = fake_step(step_log(experiment_of(line))).memory
    assert memory.parameter_bytes == 1 << 42
    assert memory.peak_parts["inputs"] == expected


@pytest.mark.parametrize("is_frozen", [False, True])
def test_what_was_frozen_of_the_heap_stays_frozen(is_frozen: bool) -> None:
    gc.unfreeze()
    if is_frozen:
        gc.freeze()
    try:
        with fake_rank._little_garbage():
            assert gc.get_freeze_count() > 0
        assert (gc.get_freeze_count() > 0) is is_frozen
    finally:
        gc.freeze()  # as all tests find it
