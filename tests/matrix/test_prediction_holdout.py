"""Models that no test uses, predicted before they are measured: the peak within 1 %, and nobody is nearer.

`tests/matrix/holdout_points.py` has two sets of models, each with several variants, on one rank and on two. A
prediction that assumes something of the data is an estimate and may be off. Formulas of others say what they
say of one rank of a decoder, with the variants that they are made for. MemTracker of torch follows every
point of one rank but offloading, whose host memory is its device's on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

import pytest

from bench.trials import experiments
from harness.experiment.experiment import Experiment
from harness.records.record import Record
from tests.matrix import memory_peers
from tests.matrix.facts import Run
from tests.matrix.holdout_points import DECODERS, FIRST, SECOND, VOCABULARY, Point, is_decoder, points_of
from tests.matrix.memory_peers import Sizes, accelerate, megatron_bridge
from tests.matrix.predicted import Refusal, findings

MOST_ERROR = 0.01
"""Relative error of the peak that a prediction may have."""


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model", [*FIRST, *SECOND])
def test_the_peak_is_predicted_and_nobody_is_nearer(run: Run, model: str) -> None:
    if model == "cait":
        pytest.importorskip("timm")
    for _, group in groupby(points_of([model]), lambda point: point.mesh):
        points = list(group)
        chosen = experiments(point.overrides for point in points)
        for point, each, (predicted, measured) in zip(points, chosen, findings(chosen, run), strict=True):
            if isinstance(predicted, Refusal):
                assert measured.status == "refused", f"{point}: {predicted}"
                continue
            assert measured.memory is not None, f"{point}: {measured.error}"
            assert predicted.memory is not None
            real = measured.memory.peak_bytes
            error = abs(predicted.memory.peak_bytes / real - 1)
            assert error <= MOST_ERROR or predicted.assumes, point
            nearer = [name for name, said in _peers(point, each, predicted) if abs(said / real - 1) < error]
            assert nearer == [], point


def _peers(point: Point, experiment: Experiment, predicted: Record) -> Iterator[tuple[str, int]]:
    """Yield what the others that are installed say of the peak bytes of a point of one rank."""
    if point.mesh != "single" or point.compile != "none" or predicted.trained is None:
        return
    for name, (formula, acs) in memory_peers.FORMULAS.items():
        is_installed = name != "FitCheck" or memory_peers.has_fitcheck()
        if is_decoder(point) and point.ac in acs and is_installed:
            yield name, formula(_sizes(point, sum(predicted.trained.elements.values())))
    if point.ac != "offload":
        yield "MemTracker", memory_peers.mem_tracker(experiment)


def _sizes(point: Point, parameters: int) -> Sizes:
    decoder = DECODERS[point.model]
    return Sizes(
        parameters=parameters,
        layers=decoder.sizes["n_layers"],
        width=decoder.sizes["width"],
        heads=decoder.sizes["n_heads"],
        hidden_width=decoder.hidden_width,
        vocab_size=VOCABULARY,
        is_tied=decoder.is_tied,
        is_gated=decoder.is_gated,
        batch_size=4,
        sequence_length=48,
        is_bf16=point.dtype == "bf16",
        ac=point.ac,
    )


@pytest.mark.parametrize("model", ["PhiConfig", "BloomConfig", "OlmoeConfig", "residual_cnn"])
def test_points_of_a_model_are_trials(model: str) -> None:
    points = list(points_of([model]))
    assert len({repr(each) for each in experiments(each.overrides for each in points)}) == len(points)


def test_sets_share_no_model() -> None:
    assert not {*FIRST} & {*SECOND}


SIZES = Sizes(
    parameters=1000,
    layers=1,
    width=10,
    heads=2,
    hidden_width=40,
    vocab_size=100,
    is_tied=True,
    is_gated=False,
    batch_size=1,
    sequence_length=2,
    is_bf16=False,
    ac="selective_op",
)


@pytest.mark.parametrize(
    ("said", "nbytes"),
    [
        pytest.param(accelerate(SIZES), 16_000, id="accelerate, four times the model"),
        pytest.param(accelerate(replace(SIZES, is_bf16=True)), 8_000, id="accelerate in bf16"),
        # 18 (200 (2 + 4 + .2) + 20 + 1000) + 2 * 10 (18 + 16) + 2 (8 + 10 + 40 * 11)
        pytest.param(megatron_bridge(SIZES), 18 * 2260 + 680 + 916, id="Megatron-Bridge"),
    ],
)
def test_formulas(said: int, nbytes: int) -> None:
    assert said == nbytes
