"""What is predicted of a step is what is measured of it, to the byte."""

from __future__ import annotations

import pytest

from harness.predict.fake_rank import fake_step
from tests.harness.composing import experiment_of
from tests.harness.predict.measured_step import measured_step

_SMALL = "data=synthetic batch_size=2 model.n_layers=3 model.width=32 model.hidden_width=64"
_TOKENS = f"{_SMALL} sequence_length=16"
_SINGLE = {
    "plain": "model=gpt_nano",
    "full": "model=gpt_nano ac=full",
    "without dropout, by another kernel": "model=gpt_nano ac=full model.dropout=0",
    "selective by operator": "model=gpt_nano ac=selective_op",
    "every second layer, and SGD": "model=llama_nano ac=selective_layer optimizer=sgd",
    "offloading": "model=llama_nano ac=offload",
    "nested": "model=llama_nano ac=nested",
    "half precision": "model=llama_nano ac=full dtype=bf16",
    "around the call": "model=gpt_nano ac=full wrap_order=call_site",
    "chunks": "model=gpt_nano chunk=budget chunk.fraction=0.6",
}


@pytest.mark.parametrize("line", [pytest.param(line, id=name) for name, line in _SINGLE.items()])
def test_one_rank_is_predicted_to_the_byte(line: str) -> None:
    experiment = experiment_of(f"{line} {_TOKENS}")
    predicted, measured = fake_step(experiment, "cpu"), measured_step(experiment)
    assert (predicted.memory, predicted.work) == (measured.memory, measured.work)
    assert predicted.observation == measured.observation
