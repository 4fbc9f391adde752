"""Points with what is predicted of them: rows for people and programs, and which of them not to run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.errors import ConfigError, PredictedOomError, UnplannedError
from harness.launchers.run_task import now
from harness.launchers.task import Point
from harness.measure.environment import describe, environment_id
from harness.predict.hardware import Hardware
from harness.ranks.forkserver import ForkServerError
from harness.records.predicted_step import Outlook, SolvedField, assuming
from harness.records.record import Identity, Record, refused
from harness.report.content.plan_table import PlannedPoint
from harness.report.facts.labels import point_labels
from harness.report.facts.number_words import human_bytes
from harness.sweep.question import FOLLOWED, Answer, Question

REFUSED, SOME_DO_NOT_FIT, ALL_FIT = 2, 1, 0
"""Exit codes of `acbench-plan`."""

Ask = Callable[[Sequence[Question]], Sequence[Answer]]
"""Returns the answers to questions, here or in a process that has imported torch."""


def planned(
    points: Sequence[tuple[Point, Hardware | None]],
    field: str | None,
    state: Callable[[Point], str],
    ask: Ask,
    kept_in: Path | None = None,
) -> list[PlannedPoint]:
    """Return a row for each distinct point on each hardware.

    Args:
        points: all points, duplicates included, with the hardware to predict each for.
        field: field to solve for; `None` takes the points as they are.
        state: whether a point is done, to run, elsewhere or refused.
        kept_in: folder of the sweep in which the steps are kept; `None` keeps none.
    """
    distinct = list(
        {(point.trial_id, repr(hardware)): (point, hardware) for point, hardware in points}.values()
    )
    labels = point_labels([point.resolved for point, _ in distinct])
    questions = [
        Question(experiment=point.experiment, label=label, hardware=hardware, field=field, kept_in=kept_in)
        for (point, hardware), label in zip(distinct, labels, strict=True)
        if point.experiment is not None
    ]
    given = iter(_answered(questions, ask))
    rows = []
    for point, hardware in distinct:
        refusal = Answer(refusal=point.refusal)
        rows.append(_row(point, hardware, state, refusal if point.experiment is None else next(given)))
    return rows


def exit_code(rows: Sequence[PlannedPoint]) -> int:
    """Return 0 where everything fits, 2 where everything is refused, and otherwise 1."""
    if all(row.record.status == "refused" and not row.is_defect for row in rows):
        return REFUSED
    is_good = all(row.outlook.fits is not False and row.record.status == "predicted" for row in rows)
    return ALL_FIT if is_good else SOME_DO_NOT_FIT


def without_predicted_oom(
    points: Sequence[Point], hardware: Hardware | None, is_done: Callable[[Any], bool], ask: Ask
) -> list[Point]:
    """Return `points`, those that do not fit refused; one that cannot be predicted is left to run.

    Args:
        hardware: what they must fit.
        is_done: whether an experiment has a finished record.

    Raises:
        ConfigError: no hardware was named.
    """
    if hardware is None:
        raise ConfigError("skip_predicted_oom", "needs a memory to fit; name one, such as hardware=h100")
    left = [point for point in points if point.experiment is not None and not is_done(point.experiment)]
    rows = planned([(point, hardware) for point in left], None, lambda _: "to run", ask)
    oom = {row.record.trial_id: _too_large(row) for row in rows if row.outlook.fits is False}
    for row in rows:
        if row.record.error is not None:
            sys.stderr.write(f"acbench: runs without a prediction: {row.record.error.message}\n")
    return [
        replace(point, experiment=None, refusal=oom[point.trial_id]) if point.trial_id in oom else point
        for point in points
    ]


def _answered(questions: Sequence[Question], ask: Ask) -> Sequence[Answer]:
    """Return the answers; where the process that gives them has ended, why there are none."""
    try:
        return ask(questions)
    except ForkServerError as error:
        return [Answer(refusal=UnplannedError("acbench-plan", str(error)))] * len(questions)


def _too_large(row: PlannedPoint) -> PredictedOomError:
    said = row.outlook
    assert said.needed_bytes is not None
    assert said.usable_bytes is not None
    needed, usable = human_bytes(said.needed_bytes), human_bytes(said.usable_bytes)
    problem = f"{said.hardware} has {usable} for a rank, and the predicted peak is {needed}"
    if row.record.assumes:
        problem = f"{problem}; {assuming(row.record.assumes)}"
    return PredictedOomError("hardware", problem)


def _row(
    point: Point,
    hardware: Hardware | None,
    state: Callable[[Point], str],
    answer: Answer,
) -> PlannedPoint:
    record, solved = answer.record, answer.solved
    outlook = Outlook(
        state="refused",
        hardware=None if hardware is None else hardware.name,
        usable_bytes=None if hardware is None else hardware.usable_bytes,
    )
    if record is None:
        refusal = _refused(point, answer.refusal)
        is_defect = isinstance(answer.refusal, UnplannedError)
        return PlannedPoint(asked=point.resolved, record=refusal, outlook=outlook, is_defect=is_defect)
    assert record.memory is not None, "a prediction has bytes"
    outlook = replace(
        outlook,
        state=state(point),
        needed_bytes=record.memory.peak_bytes if hardware is None else hardware.needed_bytes(record.memory),
        is_stand_in=hardware is not None and hardware.device != FOLLOWED,
        solved=None
        if solved is None
        else SolvedField(field=solved.field, value=solved.value, is_limit=solved.is_limit),
        bound_by=answer.bound_by,
    )
    return PlannedPoint(asked=point.resolved, record=record, outlook=outlook)


def _refused(point: Point, refusal: ValueError | None) -> Record:
    environment = describe("cpu")
    identity = Identity(
        trial_id=point.trial_id,
        environment_id=environment_id(environment),
        name="prediction",
        experiment=point.resolved,
    )
    return refused(identity, str(refusal), at=now(), environment=environment)
