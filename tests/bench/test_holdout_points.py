"""The holdouts' points compose, each once, and sets share no model."""

from __future__ import annotations

import pytest

from bench.holdout_points import FIRST, SECOND, points_of
from bench.trials import experiments


@pytest.mark.parametrize("model", ["PhiConfig", "BloomConfig", "OlmoeConfig", "residual_cnn"])
def test_points_of_a_model_are_trials(model: str) -> None:
    points = list(points_of([model]))
    assert len({repr(each) for each in experiments(each.overrides for each in points)}) == len(points)


def test_sets_share_no_model() -> None:
    assert not {*FIRST} & {*SECOND}
