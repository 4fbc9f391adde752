"""A step found between those of three batch sizes is, in every field, the step that is traced in full."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.experiment.experiment import Experiment
from harness.experiment.mesh import Mesh
from harness.models.mlp import MLPSpec
from harness.predict import prediction
from harness.predict.batch_sizes import follow_from_others, found_between, traced_batch_sizes
from harness.predict.fake_rank import step_log
from harness.predict.step_log import StepLog, fake_step
from strategies import chunk_variants, shard_variants
from tests.harness.composing import experiment_of, lines

_MLP = "data=synthetic model=mlp model.n_layers=2 sequence_length=8 model.width=16 model.hidden_width=32"
_LAYERS = "data=synthetic model.n_layers=3 sequence_length=16 model.width=32 model.hidden_width=64"
_PICTURES = "data=synthetic model=vit_nano model.n_layers=2 model.width=32 model.hidden_width=64"
_ALIKE = {
    "full AC": f"{_MLP} ac=full",
    "offloading by shards": f"{_MLP} ac=offload mesh=shard2",
    "a region in a region": f"{_LAYERS} model=llama_nano ac=nested",
    "selective AC by tensors": f"{_MLP} ac=selective_op mesh=tp2 dtype=bf16_mixed",
}
_MORE_ALIKE = {
    "plain": f"{_LAYERS} model=gpt_nano optimizer=sgd",
    "every second block, replicas": f"{_LAYERS} model=llama_nano ac=selective_layer mesh=ddp2",
    "with dropout, rewound": f"{_LAYERS} model=llama_nano ac=full ac.rewind=true model.dropout=0.1",
    "reentrant": f"{_LAYERS} model=gpt_nano ac=full ac.use_reentrant=true",
    "offloaded regions": f"{_LAYERS} model=gpt_nano ac=nested ac.levels=[2] ac.offload={{all:[[0]]}}",
    "pictures": f"{_PICTURES} ac=selective_op dtype=bf16",
    "proteins": "data=synthetic model=evoformer model.n_layers=2 ac=full",
    "shards by FSDP1": f"{_LAYERS} model=gpt_nano ac=offload mesh=shard2 mesh.fsdp=fsdp1",
    "replicas of shards": f"{_LAYERS} model=llama_nano ac=full mesh=hsdp2x2 dtype=bf16_mixed",
    "tensors of shards": f"{_LAYERS} model=llama_nano ac=nested mesh=shard2_tp2",
    "one region around the call": f"{_LAYERS} model=llama_nano ac=full mesh=tp2 wrap_order=call_site",
}
_SIZES = (1, 2, 3, 5, 6, 7, 9)


def _log(experiment: Experiment) -> StepLog:
    return step_log(experiment)


def _sized(line: str, samples_of_a_rank: int) -> Experiment:
    return experiment_of(f"{line} batch_size={samples_of_a_rank * experiment_of(line).mesh.dp}")


@pytest.mark.parametrize("line", lines(_ALIKE, _MORE_ALIKE))
def test_the_step_between_is_the_full_one(line: str) -> None:
    experiment = _sized(line, 3)
    traced = traced_batch_sizes(experiment, [size * experiment.mesh.dp for size in _SIZES])
    assert traced == tuple(size * experiment.mesh.dp for size in (2, 6, 9))
    log = found_between(experiment, traced, _log)
    assert log is not None
    assert fake_step(log) == fake_step(_log(experiment))


@pytest.mark.parametrize("size", [1, 2, 6, 9, 10])
def test_nothing_is_found_at_the_ends_and_beyond(size: int) -> None:
    assert found_between(_sized(f"{_MLP} ac=full", size), (2, 6, 9), _log) is None


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((2, 4, 8), id="three are all"),
        pytest.param((1, 2, 4, 8), id="one sample is traced by itself"),
        pytest.param((4, 4, 4, 4), id="one size"),
    ],
)
def test_few_batch_sizes_are_all_traced(sizes: tuple[int, ...]) -> None:
    assert traced_batch_sizes(experiment_of(_MLP), sizes) is None


@pytest.mark.parametrize(
    ("line", "changes"),
    [
        pytest.param("model=unet", {}, id="a model that may ask more of sizes"),
        pytest.param(f"{_MLP} ac=budget ac.fraction=0.5", {}, id="a plan of bytes"),
        pytest.param(_MLP, {"chunk": chunk_variants["minimum"]()}, id="chunks"),
        pytest.param(
            _MLP,
            {"shard": shard_variants["megatron"](), "mesh": Mesh(tp=2, device="cpu")},
            id="a sharding variant",
        ),
    ],
)
def test_other_steps_are_traced_in_full(line: str, changes: dict[str, Any]) -> None:
    experiment = replace(experiment_of(line), **changes)
    assert not follow_from_others(experiment)
    assert traced_batch_sizes(experiment, _SIZES) is None


def _more_at(size: int, log: StepLog, batch_size: int) -> StepLog:
    """Return a log that has a byte more at one batch size."""
    history = log.history
    return replace(
        log, history=replace(history, optimizer_bytes=history.optimizer_bytes + (batch_size == size))
    )


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(lambda log, size: _more_at(6, log, size), id="a number beside the line"),
        pytest.param(lambda log, size: _more_at(9, log, size), id="a number that is no integer between"),
        pytest.param(
            lambda log, size: replace(log, operators=log.operators[: len(log.operators) - (size == 9)]),
            id="an operator less",
        ),
        pytest.param(
            lambda log, size: replace(log, trained=replace(log.trained, inputs="rows" * (size == 6))),
            id="another word",
        ),
        pytest.param(
            lambda log, size: replace(log, block_calls=log.block_calls if size < 9 else {}),
            id="other parts",
        ),
        pytest.param(
            lambda log, size: replace(
                log, observation=replace(log.observation, unneeded=None if size < 9 else "no")
            ),
            id="another type",
        ),
    ],
)
def test_steps_that_are_unlike_are_found_out(changed: Any) -> None:
    experiment = _sized(f"{_MLP} ac=none", 3)
    traced = (2, 6, 9)
    assert found_between(experiment, traced, lambda one: changed(_log(one), one.batch_size)) is None


def test_the_points_of_a_sweep_trace_three_batch_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counted(experiment: Experiment, rank: int | None, **others: Any) -> StepLog:
        asked.append(experiment.batch_size)
        return step_log(experiment, rank, **others)

    monkeypatch.setattr(prediction, "step_log", counted)
    line = _MLP.replace("width=16", "width=24")  # of which no other test asks
    for size in _SIZES:
        prediction.step_of(_sized(line, size), _SIZES)
    assert sorted(asked) == [1, 2, 6, 9]


def test_a_model_that_says_what_is_not_so_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = MLPSpec.loss

    def uneven(spec: MLPSpec, outputs: Any, batch: Any) -> Any:
        outputs = outputs.relu() if len(outputs) > 5 else outputs
        return usual(spec, outputs, batch)

    monkeypatch.setattr(MLPSpec, "loss", uneven)
    assert found_between(_sized(f"{_MLP} ac=none", 3), (2, 6, 9), _log) is None
