"""A trial is predicted before it runs, where that costs little; a failure keeps none from running."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.command_line.schema import experiment_fields, materialise
from harness.launchers.foresight import PATIENCE_S, Foresight, foreseen
from harness.ranks.forkserver import ForkServerError
from tests.harness.composing import composed, experiment_of
from tests.harness.sweeping import task

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


_OURS, _USERS = "ac=full", "ac=python ac.factory=examples.theirs:every_second"


@pytest.mark.parametrize(
    ("variants", "seconds", "made"),
    [
        pytest.param([_OURS] * 8, 0.0, [[0], [1, 2], [3, 4, 5, 6], [7]], id="as many again as there were"),
        pytest.param([_OURS] * 6, 9.0, [[0], [1], [2], [3], [4], [5]], id="alone where each takes long"),
        pytest.param(
            [_OURS, _OURS, _USERS, _OURS, _OURS], 0.0, [[0], [1, 3], [2], [4]], id="code of the user's alone"
        ),
    ],
)
def test_trials_are_predicted_together(
    monkeypatch: pytest.MonkeyPatch, variants: list[str], seconds: float, made: list[list[int]]
) -> None:
    tasks = [
        replace(task(number), experiment=experiment_of(f"model=mlp protocol=standard data=synthetic {each}"))
        for number, each in enumerate(variants)
    ]
    clock = [0.0]
    together: list[list[int]] = []

    def call(_target: str, experiment: Any, *_: Any, **__: Any) -> Any:
        clock[0] += seconds
        number = next(at for at, each in enumerate(tasks) if each.experiment is experiment)
        together[-1].append(number)
        return number

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    seen = Foresight(call=call, folder=_FOLDER, tasks=tasks)
    for number, each in enumerate(tasks):
        together.append([])
        assert str(seen.of(each)) == str(number)
    assert [each for each in together if each] == made


def test_a_process_that_ends_or_takes_too_long_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    def late(target: str, *_: Any, deadline_s: float) -> int:
        raise ForkServerError(f"{target}: did not return within {deadline_s:g} s")

    experiment = experiment_of("model=mlp protocol=standard data=synthetic")
    assert foreseen(experiment, None, late, folder=_FOLDER) is None
    problem = f"harness.predict.prediction:predicted_step: did not return within {PATIENCE_S:g} s"
    assert capsys.readouterr().err == f"acbench: runs without a prediction: {problem}\n"
