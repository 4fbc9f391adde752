"""What is predicted of a step is what is measured of it, to the byte."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from harness.errors import ConfigError
from harness.predict.fake_rank import step_log
from harness.predict.step_log import fake_step
from tests.harness.composing import experiment_of
from tests.harness.predict.measured_step import measured_step, step_of_rank
from tests.rank_pool import RankPool

_SMALL = "data=synthetic batch_size=2 model.n_layers=2 model.width=32 model.hidden_width=64"
_TOKENS = f"{_SMALL} sequence_length=16"
_ONE_RANK = {
    "full AC": "model=gpt_nano ac=full",
    "without dropout, by another kernel": "model=llama_nano ac=selective_op model.dropout=0",
    "offloading, and SGD": "model=llama_nano ac=offload optimizer=sgd",
    "nested, in half precision": "model=llama_nano ac=nested dtype=bf16",
}
_MORE_OF_ONE_RANK = {
    "plain": "model=gpt_nano",
    "every second layer": "model=llama_nano ac=selective_layer",
    "images": "model=vit_nano ac=full",
    "around the call": "model=gpt_nano ac=full wrap_order=call_site",
    "chunks": "model=gpt_nano chunk=budget chunk.fraction=0.6",
    "chunks under full AC": "model=gpt_nano chunk=minimum ac=full",
}


def _rows(common: Mapping[str, str], further: Mapping[str, str]) -> list[Any]:
    """Return all rows; only `make matrix` runs the `further` ones."""
    rows = [pytest.param(line, id=name) for name, line in common.items()]
    return rows + [pytest.param(line, id=name, marks=pytest.mark.matrix) for name, line in further.items()]


@pytest.mark.parametrize("line", _rows(_ONE_RANK, _MORE_OF_ONE_RANK))
def test_one_rank_is_predicted_to_the_byte(line: str) -> None:
    size = _TOKENS if "vit" not in line else _SMALL
    experiment = experiment_of(f"{size} {line}")
    predicted, measured = fake_step(step_log(experiment, "cpu"), "cpu"), measured_step(experiment)
    assert (predicted.memory, predicted.work) == (measured.memory, measured.work)
    assert predicted.observation == measured.observation


_TWO_RANKS = {
    "replicas": "model=gpt_nano mesh=ddp2 ac=full",
    "shards on the host, and offloading": "model=llama_nano mesh=shard2 mesh.cpu_offload=true ac=offload",
    "tensors": "model=gpt_nano mesh=tp2 ac=full",
}
_MORE_OF_TWO_RANKS = {
    "shards": "model=llama_nano mesh=shard2 ac=selective_op",
    "shards by FSDP1": "model=llama_nano mesh=shard2 mesh.fsdp=fsdp1 ac=full",
    "AC around shards, in half precision": (
        "model=llama_nano mesh=shard2 wrap_order=outside_fsdp ac=full dtype=bf16_mixed"
    ),
}
_FOUR_RANKS = {
    "replicas of shards": "model=gpt_nano mesh=hsdp2x2 ac=full batch_size=4",
    "shards of tensors": "model=llama_nano mesh=shard2_tp2 ac=selective_layer",
}
_VIEWS = pytest.mark.filterwarnings(
    "ignore:FSDP2-wrapped module:UserWarning"
)  # outputs that are, as in a trial


@pytest.mark.parametrize("line", _rows(_TWO_RANKS, _MORE_OF_TWO_RANKS))
def test_ranks_are_predicted_to_the_byte(line: str, pool2: RankPool) -> None:
    _compare(line, pool2)


@pytest.mark.parametrize("line", _rows({}, _FOUR_RANKS))
def test_meshes_of_two_dimensions(line: str, pool4: RankPool) -> None:
    _compare(line, pool4)


def _compare(line: str, pool: RankPool) -> None:
    experiment = experiment_of(f"{_TOKENS} {line}")
    predicted, measured = fake_step(step_log(experiment, "cpu"), "cpu"), pool.run(step_of_rank, experiment)[0]
    assert (predicted.memory, predicted.work) == (measured.memory, measured.work)
    assert predicted.observation == measured.observation


@pytest.mark.parametrize(
    ("line", "device", "message"),
    [
        pytest.param(
            "model=moe_nano",
            "cpu",
            "model: aten.nonzero.default gives a shape that depends on data, which a prediction has not "
            r"\(in 'layers.0.feed_forward', feed_forward.py, line \d+\); a trial measures it",
            id="tokens of an expert",
        ),
        pytest.param(
            "model=mlp compile=aot_eager",
            "cpu",
            "compile: a compiled step cannot be predicted; a trial measures it, or use compile=none",
            id="compiled",
        ),
        pytest.param(
            "model=mlp", "cuda", "device: must be one of cpu, got 'cuda': torch ends .*", id="a GPU"
        ),
    ],
)
def test_what_cannot_be_predicted_is_refused(line: str, device: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        fake_step(step_log(experiment_of(f"{_TOKENS} {line}"), device), device)


def test_a_factory_that_reads_a_value_is_refused_with_its_line() -> None:
    line = "data=synthetic model=python model.factory=tests.harness.user_models:reads_values"
    message = (
        r"^model\.factory: 'tests\.harness\.user_models:reads_values' reads values of tensors, which a "
        r"prediction has not: aten\._local_scalar_dense\.default \(user_models\.py, line \d+, in .*\); "
        "take them from Python's own numbers, or run the trial, which measures$"
    )
    with pytest.raises(ConfigError, match=message):
        fake_step(step_log(experiment_of(line), "cpu"), "cpu")
