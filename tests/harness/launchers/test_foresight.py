"""A trial is predicted right before it runs, where that costs little; a failure keeps none from running."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.command_line.schema import experiment_fields, materialise
from harness.launchers.foresight import PATIENCE_S, foreseen
from harness.ranks.forkserver import ForkServerError
from tests.harness.composing import composed, experiment_of

_FOLDER = Path("outputs")


@pytest.mark.parametrize(
    ("line", "predicted"),
    [
        pytest.param("model=mlp protocol=standard", "the step", id="a trial that times long enough"),
        pytest.param("model=mlp protocol=smoke", None, id="a short trial"),
        pytest.param("model=mlp protocol=standard chunk=minimum", "the step", id="chunks, planned once more"),
        pytest.param("model=mlp protocol=standard mesh.device=cuda", None, id="kernels of CUDA"),
        pytest.param(
            "model=python model.factory=tests.harness.user_models:healthy protocol=standard",
            None,
            id="code of the user's",
        ),
    ],
)
def test_a_step_is_predicted_where_it_costs_little(line: str, predicted: str | None) -> None:
    experiment = materialise(experiment_fields(composed([*line.split(), "data=synthetic"])))
    assert str(foreseen(experiment, None, lambda *_, **__: "the step", folder=_FOLDER)) == str(predicted)


def test_a_prediction_is_told_where_the_trial_looks_for_plans() -> None:
    told: list[Any] = []
    experiment = experiment_of("model=mlp protocol=standard data=synthetic")
    foreseen(experiment, None, lambda *arguments, **_: told.append(arguments[1:]), folder=_FOLDER)
    assert told == [(experiment, None, _FOLDER)]


def test_a_process_that_ends_or_takes_too_long_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    def late(target: str, *_: Any, deadline_s: float) -> int:
        raise ForkServerError(f"{target}: did not return within {deadline_s:g} s")

    experiment = experiment_of("model=mlp protocol=standard data=synthetic")
    assert foreseen(experiment, None, late, folder=_FOLDER) is None
    problem = f"harness.predict.prediction:predicted_step: did not return within {PATIENCE_S:g} s"
    assert capsys.readouterr().err == f"acbench: runs without a prediction: {problem}\n"
