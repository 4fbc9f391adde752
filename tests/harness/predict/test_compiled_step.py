"""Compiled steps are predicted to the byte, with their graphs and what these recompute."""

from __future__ import annotations

import warnings

import pytest

from harness.predict.compiled_step import CompiledFakes, fakes_of
from harness.predict.fake_rank import step_log
from harness.predict.repeated_blocks import is_repetitive
from harness.predict.step_log import fake_step
from harness.trial.compilation import compiling
from tests.harness.composing import experiment_of
from tests.harness.predict.measured_step import MeasuredStep, measured_step, step_of_rank
from tests.rank_pool import RankPool

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Dynamo's own
_SMALL = (
    "compile=aot_eager data=synthetic batch_size=2 sequence_length=16 model.n_layers=2 model.width=32 "
    "model.hidden_width=64"
)


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("model=gpt_nano ac=full model.dropout=0.1", id="full AC, with random numbers"),
        pytest.param("model=mlp ac=offload", marks=pytest.mark.matrix, id="offloading"),
        pytest.param(
            "model=llama_nano ac=selective_op",
            marks=pytest.mark.matrix,
            id="selective AC",
        ),
        pytest.param(
            "model=llama_nano compile_scope=model dtype=bf16_mixed",
            marks=pytest.mark.matrix,
            id="whole model",
        ),
    ],
)
def test_what_is_compiled_is_predicted_to_the_byte(line: str) -> None:
    experiment = experiment_of(f"{_SMALL} {line}")
    predicted = fake_step(step_log(experiment))
    with compiling(experiment):
        measured = measured_step(experiment)
    assert (predicted.memory, predicted.work) == (measured.memory, measured.work)
    assert predicted.work.compiled_graphs == 2


@pytest.mark.parametrize("ac", ["nested", "offload"])
def test_experts_are_called_between_graphs(ac: str) -> None:
    plain, variant = (
        fake_step(step_log(experiment_of(f"{_SMALL} model=moe_nano ac={each}"))) for each in ("none", ac)
    )
    assert variant.work.forward_flops == plain.work.forward_flops
    assert variant.memory.saved_bytes < plain.memory.saved_bytes


def _compiled(rank: int, line: str) -> MeasuredStep:
    experiment = experiment_of(line)
    with warnings.catch_warnings(action="ignore"), compiling(experiment):
        return step_of_rank(rank, experiment)


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", ["ddp2", "shard2", "tp2 compile_order=compile_first"])
def test_ranks_that_compile(mesh: str, pool2: RankPool) -> None:
    line = f"{_SMALL} model=llama_nano ac=full mesh={mesh}"
    predicted = fake_step(step_log(experiment_of(line)))
    measured = pool2.run(_compiled, line)[0]
    assert (predicted.memory, predicted.work) == (measured.memory, measured.work)


def test_a_compiled_step_is_traced_in_full() -> None:
    assert not is_repetitive(experiment_of(f"{_SMALL} model=gpt_nano ac=full"))
    assert is_repetitive(experiment_of("model=gpt_nano ac=full"))


def test_only_a_compiled_step_lets_a_compiler_in() -> None:
    assert isinstance(fakes_of(experiment_of(f"{_SMALL} model=mlp")), CompiledFakes)
    assert not isinstance(fakes_of(experiment_of("model=mlp")), CompiledFakes)
    assert CompiledFakes.ignore_compile_internals()
