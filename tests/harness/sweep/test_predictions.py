"""Many predictions: in processes, in order, and none that fails keeps another from its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from harness.errors import ConfigError
from harness.experiment.experiment import Experiment
from harness.predict import prediction, step_time
from harness.records.record import Record
from harness.sweep.predictions import answers
from harness.sweep.question import Question
from tests.harness.composing import experiment_of
from tests.harness.predict.predicted import hardware, memory, predicted

_LINE = "model=mlp data=synthetic batch_size={}"


class _SilentError(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class _Raising(nn.Module):
    def forward(self) -> None:
        raise _SilentError


def _predict(experiment: Experiment, **_options: object) -> Record:
    """Refuse one batch size, fail at another, die at a third."""
    if experiment.batch_size == 3:
        raise ConfigError("model", "no")
    if experiment.batch_size == 5:
        raise ZeroDivisionError("our fault")
    if experiment.batch_size == 6:
        _Raising()()
    if experiment.batch_size == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return predicted(experiment, experiment.batch_size << 30)


def _step_of(experiment: Experiment, _device: str, _batch_sizes: Sequence[int] = ()) -> SimpleNamespace:
    return SimpleNamespace(memory=memory(experiment.batch_size << 30), trace="the trace")


@pytest.fixture(autouse=True)
def _free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "predict", _predict)
    monkeypatch.setattr(prediction, "step_of", _step_of)
    monkeypatch.setattr(step_time, "bound_by", lambda trace, hardware: f"{trace} on {hardware.name}")


def asked(*sizes: int, field: str | None = None) -> list[Question]:
    return [
        Question(
            experiment=experiment_of(_LINE.format(size)), label=f"{size}", hardware=hardware(), field=field
        )
        for size in sizes
    ]


def test_what_a_users_model_raises_is_no_defect_of_ours() -> None:
    (answer,) = answers(asked(6))
    assert type(answer.refusal) is ConfigError
    assert str(answer.refusal).startswith(
        "model: raises when its step is predicted, on tensors without data: _SilentError: (its text cannot "
        "be had: ValueError) (test_predictions.py, line "
    )


@pytest.mark.parametrize("processes", [1, 2])
def test_each_point_has_its_answer(processes: int, capsys: pytest.CaptureFixture[str]) -> None:
    found = answers(asked(2, 3, 5, 4), processes)
    peaks = [each.record and each.record.memory and each.record.memory.peak_bytes >> 30 for each in found]
    assert peaks == [2, None, None, 4]
    assert [each.bound_by for each in found] == ["the trace on h100", None, None, "the trace on h100"]
    problem = "a defect here kept this point from being predicted: ZeroDivisionError: our fault"
    assert [str(each.refusal) for each in found[1:3]] == [
        "model: no",
        f"acbench-plan: {problem}; report it with the traceback on stderr",
    ]
    if processes == 1:
        assert capsys.readouterr().err.splitlines()[:2] == [
            "[1/4] 2: 2.0 GiB at the peak",
            "[2/4] 3: refused",
        ]


def test_a_process_that_is_killed_ends_no_command() -> None:
    refused = answers(asked(7, 2))[0].refusal
    assert str(refused).endswith("or one beside it, was killed; is there enough memory?")


def test_an_answer_that_cannot_be_sent_keeps_no_other_from_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def odd(experiment: Experiment, **options: object) -> Any:
        return _predict(experiment, **options) if experiment.batch_size == 2 else (lambda: None)

    monkeypatch.setattr(prediction, "predict", odd)
    first, second = answers(asked(4, 2))
    assert str(first.refusal).startswith("acbench-plan: no answer came back for this point: ")
    assert second.record is not None


def test_forks_of_a_process_with_threads_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def computing(experiment: Experiment, **_options: object) -> Record:
        torch.ones(1 << 20).sin().sum()
        return predicted(experiment, experiment.batch_size)

    monkeypatch.setattr(prediction, "predict", computing)
    torch.ones(1 << 20).sin().sum()
    assert all(each.record is not None for each in answers(asked(2, 4)))


def test_a_field_is_solved_for() -> None:
    (only,) = answers(asked(2, field="batch_size"), 1)
    assert only.solved is not None
    assert only.record is not None
    assert (only.solved.value, only.record.experiment["batch_size"]) == (78, 78)


def test_points_that_share_traces_are_answered_by_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def signed(experiment: Experiment, batch_sizes: Any, **_options: object) -> Record:
        record = predicted(experiment, experiment.batch_size << 30)
        return replace(record, note=f"{os.getpid()} {sorted(batch_sizes)}")

    monkeypatch.setattr(prediction, "predict", signed)
    found = answers([*asked(2, 3, 4, 5), *asked(7), *asked(2)])
    notes = [each.record and each.record.note for each in found]
    assert len(set(notes)) == 1
    assert str(notes[0]).endswith("[2, 2, 3, 4, 5, 7]")


def test_points_of_few_batch_sizes_are_asked_about_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(experiment: Experiment, batch_sizes: Any, **_options: object) -> Record:
        return replace(predicted(experiment, 1), note=str(batch_sizes))

    monkeypatch.setattr(prediction, "predict", told)
    found = answers(asked(2, 4, 2, 6), 1)
    assert [each.record and each.record.note for each in found] == ["[2, 2]", "[4]", "[2, 2]", "[6]"]
