"""Rows of `acbench-plan`: what fits, the exit code, and what a sweep leaves unrun."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from harness.errors import ConfigError, PredictedOomError, UnplannedError
from harness.experiment.experiment import Experiment
from harness.launchers.task import Point
from harness.predict.hardware import Hardware
from harness.ranks.forkserver import ForkServerError
from harness.sweep.planned import exit_code, planned, without_predicted_oom
from harness.sweep.question import Answer, Question
from tests.harness.composing import point_of
from tests.harness.predict.predicted import hardware, predicted

FITS = point_of("model=mlp data=synthetic batch_size=64")
LARGE = point_of("model=mlp data=synthetic batch_size=96")
ODD = point_of("model=mlp data=synthetic batch_size=3")
REFUSED = replace(FITS, trial_id="0" * 12, experiment=None, refusal=ConfigError("mesh", "no"))
H100 = hardware()


def ask(questions: Sequence[Question]) -> list[Answer]:
    return [_answer(each.experiment) for each in questions]


def _answer(experiment: Experiment) -> Answer:
    if experiment.batch_size == 3:
        return Answer(refusal=UnplannedError("acbench-plan", "our fault"))
    return Answer(record=predicted(experiment, experiment.batch_size << 30))


def _rows(*points: tuple[Point, Hardware | None]) -> list[tuple[str, bool | None]]:
    return [(row.outlook.state, row.outlook.fits) for row in planned(points, None, lambda _: "to run", ask)]


def test_a_row_says_whether_the_point_fits() -> None:
    points = [
        (FITS, H100),
        (LARGE, H100),
        (FITS, H100),
        (LARGE, hardware("b200")),
        (FITS, None),
        (REFUSED, H100),
    ]
    assert _rows(*points) == [
        ("to run", True),
        ("to run", False),
        ("to run", True),
        ("to run", None),
        ("refused", None),
    ]


@pytest.mark.parametrize(
    ("points", "code"),
    [
        pytest.param([FITS], 0, id="all fit"),
        pytest.param([FITS, LARGE], 1, id="one does not fit"),
        pytest.param([FITS, REFUSED], 1, id="one is refused"),
        pytest.param([REFUSED], 2, id="all are refused"),
        pytest.param([ODD], 1, id="a defect"),
    ],
)
def test_the_exit_code_says_whether_all_fit(points: list[Point], code: int) -> None:
    rows = planned([(each, H100) for each in points], None, lambda _: "to run", ask)
    assert exit_code(rows) == code


def test_without_hardware_nothing_fails_to_fit() -> None:
    assert exit_code(planned([(LARGE, None)], None, lambda _: "to run", ask)) == 0


def test_json_is_the_record_with_what_follows_from_the_hardware() -> None:
    (row,) = planned([(LARGE, H100)], None, lambda _: "done", ask)
    found = row.to_dict()
    assert (found["status"], found["trial_id"]) == ("predicted", LARGE.trial_id)
    assert (found["fits"], found["hardware"], found["state"]) == (False, "h100", "done")
    assert found["usable_bytes"] == int(78.1 * (1 << 30))


def test_what_does_not_fit_is_left_unrun(capsys: pytest.CaptureFixture[str]) -> None:
    found = without_predicted_oom([FITS, LARGE, ODD, REFUSED], H100, lambda _: False, ask)
    assert found[0] is FITS
    assert found[2] is ODD  # a prediction that fails decides nothing
    assert found[3] is REFUSED
    assert isinstance(found[1].refusal, PredictedOomError)
    assert (
        str(found[1].refusal) == "hardware: h100 has 78.1 GiB for a rank, and the predicted peak is 96.0 GiB"
    )
    assert "acbench: runs without a prediction: acbench-plan: our fault" in capsys.readouterr().err


def test_a_process_that_has_ended_leaves_all_to_run(capsys: pytest.CaptureFixture[str]) -> None:
    def ended(_: Sequence[Question]) -> list[Answer]:
        raise ForkServerError("the process that called it has ended")

    assert without_predicted_oom([FITS, LARGE], H100, lambda _: False, ended) == [FITS, LARGE]
    line = "acbench: runs without a prediction: acbench-plan: the process that called it has ended\n"
    assert capsys.readouterr().err == 2 * line


def test_what_is_done_is_not_predicted() -> None:
    assert without_predicted_oom([LARGE], H100, lambda _: True, ask) == [LARGE]


def test_leaving_out_needs_a_memory() -> None:
    with pytest.raises(ConfigError) as error:
        without_predicted_oom([LARGE], None, lambda _: False, ask)
    assert str(error.value) == ("skip_predicted_oom: needs a memory to fit; name one, such as hardware=h100")
