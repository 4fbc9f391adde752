"""The dry run of a command: every point of it by trial id, and nothing runs or is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from harness.experiment.experiment import Experiment
from harness.launchers.task import Point
from harness.records.claims import claimant, is_abandoned
from harness.records.store import Store
from harness.report.facts.labels import point_labels

_TO_RUN = "to run"
_STATES = (_TO_RUN, "done", "elsewhere", "refused")


def outline(points: Sequence[Point], store: Store, is_done: Callable[[Experiment], bool]) -> str:
    """Return a line a distinct point, `trial id  state  label`, and how many there are of each state.

    A point is `to run`, `done`, `elsewhere` (another command or the scheduler has it) or `refused`, with why.

    Args:
        store: store of the sweep, which need not exist.
        is_done: whether an experiment has a finished record and need not run.
    """
    distinct = {point.trial_id: point for point in points}
    labels = point_labels([point.resolved for point in distinct.values()])
    states = [state_of(point, store, is_done) for point in distinct.values()]
    width = max(map(len, _STATES))
    lines = [
        f"{point.trial_id}  {state:<{width}}  {label}{'' if point.refusal is None else f': {point.refusal}'}"
        for point, state, label in zip(distinct.values(), states, labels, strict=True)
    ]
    counts = Counter(states)
    parts = [f"{counts[state]} {state}" for state in _STATES if counts[state] or state == _TO_RUN]
    if len(points) > len(distinct):
        parts.append(f"{len(points) - len(distinct)} duplicates")
    noun = "point" if len(points) == 1 else "points"
    return "\n".join([*lines, f"{len(points)} {noun}: {', '.join(parts)}; nothing has run"])


def state_of(point: Point, store: Store, is_done: Callable[[Experiment], bool]) -> str:
    """Return `to run`, `done`, `elsewhere` or `refused`; arguments are those of `outline`."""
    if point.experiment is None:
        return "refused"
    if is_done(point.experiment):
        return "done"
    is_claimed = claimant(store, point.trial_id) is not None and not is_abandoned(store, [point.trial_id])
    return "elsewhere" if is_claimed else _TO_RUN
