"""The first sentence of a report: which trial makes which others a worse choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.records.record import is_baseline
from harness.report.content.pareto import ParetoFront, TradeOff
from harness.report.facts.baseline import is_sharded
from harness.report.facts.document import CodeText, Line, LinePart, Statement, plain
from harness.report.facts.number_words import and_more
from harness.report.facts.sweep_records import Entry, sentence

_MOST_NAMED = 4


def domination(fronts: Sequence[ParetoFront], *, names_meshes: bool) -> Iterator[Statement]:
    """Yield which trial dominates most others of its mesh; nothing where none does.

    Args:
        fronts: the front of each mesh. Meshes that tell the same share a clause.
        names_meshes: whether the trials ran on several meshes.
    """
    clauses: dict[str, tuple[Line, list[str]]] = {}
    for front in fronts:
        if (clause := _most(front)) is not None:
            clauses.setdefault(plain(clause), (clause, []))[1].append(front.points[0].entry.mesh)
    line: list[LinePart] = []
    for clause, meshes in clauses.values():
        line += ["; "] if line else []
        line += [f"{'on' if line else 'On'} {_and(meshes)}, ", *clause] if names_meshes else clause
    if line:
        end = ": no more memory, no more time in the median, and clearly less of one."
        yield sentence(*line, end, of=[point.entry for front in fronts for point in front.points])


def baseline_among(entries: Sequence[Entry]) -> LinePart:
    """Return the words for a baseline: beside sharded trials it is sharded by the mesh."""
    is_one_of_them = any(is_sharded(entry.record.experiment) for entry in entries)
    return CodeText(text="shard=none") if is_one_of_them else "the plain model"


def _most(front: ParetoFront) -> Line | None:
    """Return `a dominates b, c` of the trial that dominates most."""
    behind: dict[str, list[TradeOff]] = {point.entry.trial_id: [] for point in front.best}
    for point in front.points:
        if (by := front.dominated.get(point.entry.trial_id)) is not None:
            behind[by.entry.trial_id].append(point)  # the least of all that dominate it is on the front
    by = max(front.best, key=lambda point: len(behind[point.entry.trial_id]), default=None)
    if by is None or not (others := behind[by.entry.trial_id]):
        return None
    plain_model = baseline_among([point.entry for point in front.points])
    names: list[LinePart] = [
        plain_model if is_baseline(point.entry.record.experiment) else CodeText(text=point.entry.choice)
        for point in (by, *others[:_MOST_NAMED])
    ]
    line: list[LinePart] = [names[0], " dominates ", names[1]]
    for name in names[2:]:
        line += [", ", name]
    return (*line, and_more(len(others) - _MOST_NAMED))


def _and(meshes: Sequence[str]) -> str:
    return " and ".join((", ".join(meshes[:-1]), meshes[-1])) if len(meshes) > 1 else meshes[0]
