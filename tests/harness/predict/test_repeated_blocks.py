"""A step that is composed of two shorter ones is, in every field, the step that is traced in full."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from harness.experiment.experiment import Experiment
from harness.experiment.mesh import Mesh
from harness.models.mlp import MLPSpec
from harness.predict.fake_rank import step_log
from harness.predict.prediction import step_of
from harness.predict.repeated_blocks import composed, is_deep, is_repetitive
from harness.predict.step_log import FakeStep, StepLog, fake_step
from strategies import chunk_variants, shard_variants
from strategies.ac.selective_layer import SelectiveLayer
from tests.harness.composing import experiment_of, lines

_SIZES = "data=synthetic batch_size=4 model.n_layers=6"
_MLP = f"{_SIZES} model=mlp sequence_length=8 model.width=16 model.hidden_width=32"
_LAYERS = f"{_SIZES} sequence_length=16 model.width=32 model.hidden_width=64"
_ALIKE = {
    "full AC": f"{_MLP} ac=full",
    "offloading by shards": f"{_MLP} ac=offload mesh=shard2",
    "one region around the call": f"{_MLP} ac=full wrap_order=call_site optimizer=sgd",
    "selective AC by tensors": f"{_MLP} ac=selective_op mesh=tp2",
}
_MORE_ALIKE = {
    "plain": f"{_LAYERS} model=gpt_nano",
    "reentrant": f"{_LAYERS} model=llama_nano ac=full ac.use_reentrant=true",
    "rewound, with dropout": f"{_LAYERS} model=llama_nano ac=full ac.rewind=true model.dropout=0.1",
    "every second matmul": f"{_LAYERS} model=llama_nano ac=selective_op ac.matmul_recompute_every=2",
    "attention alone": f"{_LAYERS} model=gpt_nano ac=full ac.module_classes=[CausalSelfAttention]",
    "images": f"{_SIZES} model=vit_nano model.width=32 model.hidden_width=64 ac=selective_op dtype=bf16",
    "proteins": f"{_SIZES} model=evoformer ac=full",
    "shards by FSDP1": f"{_LAYERS} model=gpt_nano ac=full mesh=shard2 mesh.fsdp=fsdp1",
    "AC around shards": f"{_LAYERS} model=llama_nano ac=full mesh=shard2 wrap_order=outside_fsdp",
    "shards that stay whole": (
        f"{_LAYERS} model=llama_nano ac=selective_op mesh=hsdp2x2 dtype=bf16_mixed "
        "mesh.reshard_after_forward=false"
    ),
    "shards on the host": f"{_LAYERS} model=gpt_nano ac=full mesh=shard2 mesh.cpu_offload=true",
    "tensors of shards": f"{_LAYERS} model=llama_nano ac=full mesh=shard2_tp2",
}


def _log(experiment: Experiment) -> StepLog:
    return step_log(experiment)


def _without_births(full: FakeStep) -> FakeStep:
    """Return a step as a composed one tells it, which does not tell what made a storage."""
    assert full.memory.largest_at_peak
    return replace(full, memory=replace(full.memory, largest_at_peak=()))


@pytest.mark.parametrize("line", lines(_ALIKE, _MORE_ALIKE))
def test_the_composed_step_is_the_full_one(line: str) -> None:
    experiment = experiment_of(line)
    log = composed(experiment, _log)
    assert log is not None
    assert fake_step(log) == _without_births(fake_step(_log(experiment)))


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(f"{_MLP} ac=selective_layer", id="a strategy that counts blocks"),
        pytest.param(f"{_MLP} ac=nested", id="regions of several blocks"),
        pytest.param(f"{_MLP} mesh=ddp2", id="buckets of replicas"),
        pytest.param("model=unet ac=full", id="blocks that differ"),
    ],
)
def test_other_steps_are_traced_in_full(line: str) -> None:
    assert not is_repetitive(experiment_of(line))


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param({"chunk": chunk_variants["minimum"]()}, id="chunks"),
        pytest.param(
            {"shard": shard_variants["megatron"](), "mesh": Mesh(tp=2, device="cpu")}, id="a sharding variant"
        ),
    ],
)
def test_steps_of_plans_are_traced_in_full(chosen: dict[str, Any]) -> None:
    assert not is_repetitive(replace(experiment_of(f"{_MLP} ac=full"), **chosen))


def test_a_model_whose_blocks_differ_is_traced_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    build = MLPSpec.build

    def uneven(spec: MLPSpec) -> nn.Module:
        model = build(spec)
        model.layers[5].dropout.p = 0.5  # type: ignore[index, union-attr]
        return model

    monkeypatch.setattr(MLPSpec, "build", uneven)
    other = _MLP.replace("width=16", "width=24")  # of which no other test has looked at the blocks
    assert not is_repetitive(experiment_of(f"{other} ac=full"))


def test_a_strategy_that_says_what_is_not_so_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SelectiveLayer, "acts_on_each_block_alone", True)
    assert composed(experiment_of(f"{_MLP} ac=selective_layer"), _log) is None


def test_few_blocks_are_no_reason_to_compose() -> None:
    few, many = (experiment_of(_MLP.replace("n_layers=6", f"n_layers={count}")) for count in (7, 8))
    assert [is_deep(each) for each in (few, many)] == [False, True]


def test_a_deep_model_is_predicted_as_if_it_were_traced() -> None:
    deep = experiment_of(f"{_MLP} ac=full optimizer=sgd".replace("n_layers=6", "n_layers=9"))
    deep = replace(deep, seed=1)  # which no other test has traced
    assert step_of(deep) == _without_births(fake_step(_log(deep)))
