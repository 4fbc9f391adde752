"""The holdout's points compose, and formulas of others say what can be reckoned by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.holdout_points import Point
from bench.memory_peers import Sizes, accelerate, megatron_bridge
from bench.prediction_holdout import Finding, _worst_of_peers

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


def test_the_worst_of_an_estimator_has_its_sign() -> None:
    point = Point(model="PhiConfig", mesh="single", ac="none")
    found = [
        Finding(point=point, predicted=None, measured={"peak_bytes": 100}, peers={"FitCheck": said})
        for said in (120, 50, "not installed")
    ]
    worst = _worst_of_peers(found)["FitCheck"]
    assert (worst["points"], worst["failed"], worst["worst_error"], worst["mean_error"]) == (2, 1, -0.5, 0.35)
