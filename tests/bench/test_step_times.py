"""Which pairs of variants are in the predicted order, and that one step is timed at all."""

from __future__ import annotations

import pytest

from bench.prediction.step_times import StepTime, ordered, step_times
from tests.harness.predict.predicted import hardware


def step(predicted_s: float, measured_s: float, quartile_s: float, model: str = "mlp") -> StepTime:
    return StepTime(
        model=model, ac="full", predicted_s=predicted_s, measured_s=measured_s, quartile_s=quartile_s
    )


@pytest.mark.parametrize(
    ("other", "pairs"),
    [
        pytest.param(step(1.5, 2.0, 2.2), (1, 1), id="slower, as predicted"),
        pytest.param(step(0.5, 2.0, 2.2), (0, 1), id="slower, and predicted to be quicker"),
        pytest.param(step(0.5, 1.1, 1.3), (0, 0), id="intervals that meet"),
        pytest.param(step(0.5, 2.0, 2.2, "unet"), (0, 0), id="another model"),
    ],
)
def test_pairs_count_where_the_intervals_do_not_meet(other: StepTime, pairs: tuple[int, int]) -> None:
    assert ordered([step(1.0, 1.0, 1.2), other]) == ordered([other, step(1.0, 1.0, 1.2)]) == pairs


def test_a_step_is_predicted_and_measured() -> None:
    (found,) = step_times("mlp", ["none"], rounds=2, hardware=hardware("epyc_9004"))
    assert 0 < found.measured_s <= found.quartile_s
    assert found.predicted_s > 0
    assert abs(found.error) < 100
