"""The first sentence of a report and the last line on a terminal: what to use, and what it costs.

The rule, for the trials of one mesh that are neutral, timed and below the baseline's peak:

1. The knee. Saved bytes and added step time are taken as shares of the most that any of these trials on the
   Pareto front saves and adds. The knee has the largest difference of the two. Differences within 0.05 are
   equal: then more saved bytes win.
2. Ties. A peak at most 2 % above the knee's, with an interval of step times that meets the knee's, is as
   good. Of those the simplest wins: what torch does alone, in the order of `_SIMPLEST`, before the rest. One
   that is no simpler than what is ahead of it has no part in this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.records.statistics import MIN_PAIRS
from harness.report.content.columns import is_like_baseline, ratio_with_interval
from harness.report.facts import quantities
from harness.report.facts.baseline import baseline, is_sharded, of_baseline
from harness.report.facts.document import CodeText, Line, LinePart, Statement, plain
from harness.report.facts.labels import group_name
from harness.report.facts.number_words import and_more
from harness.report.facts.pareto import ParetoFront, TradeOff
from harness.report.facts.sweep_records import Entry, sentence

_SIMPLEST = ("full", "selective_layer", "selective_op", "offload")
_EQUAL_SCORES = 0.05
_EQUAL_PEAKS = 0.02
_MOST_MESHES = 4


def recommendation(fronts: Sequence[ParetoFront], *, names_meshes: bool) -> Iterator[Statement]:
    """Yield what to use on each mesh; nothing where nothing can be compared.

    Args:
        fronts: the front of each mesh. Meshes with the same advice share a clause.
        names_meshes: whether the trials ran on several meshes.
    """
    clauses: dict[str, tuple[Line, list[str]]] = {}
    for front in fronts:
        if (clause := _advice(front)) is not None:
            place = front.points[0].entry.mesh
            clauses.setdefault(plain(clause), (clause, []))[1].append(place)
    line: list[LinePart] = []
    for clause, meshes in list(clauses.values())[:_MOST_MESHES]:
        line += ["; "] if line else []
        first = "on" if line else "On"
        line += [f"{first} {_and(meshes)}, use ", *clause] if names_meshes else ["Use ", *clause]
    if line:
        more = and_more(len(clauses) - _MOST_MESHES)
        yield sentence(*line, more, ".", of=[point.entry for front in fronts for point in front.points])


def recommended(front: ParetoFront) -> TradeOff | None:
    """Return the trial to use by the rule above; `None` where no neutral trial saves peak memory."""
    tried = [point for point in front.points if is_offer(point.entry)]
    offers = [point for point in tried if point.entry.trial_id not in front.dominated] or tried
    if not offers:
        return None
    most, dearest = max(map(_saved, offers)), max(map(_added, offers))
    scores = [_saved(point) / most - (_added(point) / dearest if dearest else 0) for point in offers]
    near = [
        point for point, score in zip(offers, scores, strict=True) if score >= max(scores) - _EQUAL_SCORES
    ]
    knee = min(near, key=lambda point: (point.peak_bytes, point.ratio.median))
    equal = [
        point
        for point in tried
        if point.peak_bytes <= knee.peak_bytes * (1 + _EQUAL_PEAKS)
        and point.ratio.low <= knee.ratio.high
        and knee.ratio.low <= point.ratio.high
        and (point is knee or (ahead := _ahead(point, front)) is None or _is_simpler(point, ahead))
    ]
    return min(equal, key=lambda point: (_complexity(point.entry), point.peak_bytes))


def baseline_among(entries: Sequence[Entry]) -> LinePart:
    """Return the words for a baseline: with sharded trials it is sharded by the mesh."""
    is_one_of_them = any(is_sharded(entry.record.experiment) for entry in entries)
    return CodeText(text="shard=none") if is_one_of_them else "the plain model"


def _advice(front: ParetoFront) -> Line | None:
    """Return `full: 35% less peak memory at 1.32x [1.29, 1.46] the step time`."""
    point = recommended(front)
    if point is None:
        is_compared = any(not each.entry.is_baseline for each in front.points)
        if not is_compared:
            return None
        words = baseline_among([each.entry for each in front.points])
        return (words, ": nothing that was timed needs less peak memory", *_on_gpu(front, 0.0))
    saved = point.entry.number(quantities.PEAK_SAVING)
    assert saved is not None, "an offer has a share"
    experiment = point.entry.record.experiment
    of: Line = (" than ", *baseline(experiment)) if is_sharded(experiment) else ()
    name = CodeText(text=point.entry.choice)
    line = (name, ": ", saved, " less peak memory", *of, *at_time(point.entry), *_than_ahead(point, front))
    return (*line, *_on_gpu(front, saved.value))


def _ahead(point: TradeOff, front: ParetoFront) -> TradeOff | None:
    """Return the trial that tables have ahead of another one, if it may be advised."""
    ahead = front.dominated.get(point.entry.trial_id)
    return ahead if ahead is not None and is_offer(ahead.entry) else None


def _is_simpler(point: TradeOff, other: TradeOff) -> bool:
    return _complexity(point.entry) < _complexity(other.entry)


def _than_ahead(point: TradeOff, front: ParetoFront) -> Line:
    """Return which trial the advised one is behind of, and is as good as by the rule above."""
    ahead = _ahead(point, front)
    saved = None if ahead is None else ahead.entry.number(quantities.PEAK_SAVING)
    if ahead is None or saved is None or not _is_simpler(point, ahead):
        return ()
    return ("; it is simpler than ", CodeText(text=ahead.entry.choice), ", which saves ", saved)


def at_time(entry: Entry) -> Line:
    """Return ` at 1.32x [1.29, 1.46] the step time`, as firmly as the timed pairs allow."""
    time = entry.record.time
    pairs = 0 if time is None or entry.record.status == "predicted" else time.step_time_s.count
    if 0 < pairs < MIN_PAIRS:
        words = f" at a step time that {pairs} timed {'pair' if pairs == 1 else 'pairs'} cannot resolve"
        return (f"{words} (protocol.timed_pairs={MIN_PAIRS} or more may)",)
    line = (" at ", *ratio_with_interval(entry), " the step time")
    if is_like_baseline(entry):
        return (*line, ", which cannot be told from ", *of_baseline(entry.record.experiment))
    return line


def is_offer(entry: Entry) -> bool:
    """Return whether a trial is neutral and saves memory."""
    is_tried = entry.record.verdict == "neutral" and not entry.is_baseline
    return is_tried and (quantities.PEAK_SAVING.of(entry.record) or 0) > 0


def _on_gpu(front: ParetoFront, share: float) -> Line:
    """Return what a trial that moves to host memory frees on a GPU, if that is more than `share`."""
    for point in front.as_on_gpu[:1]:
        saved = point.entry.number(quantities.PEAK_SAVING)
        if saved is not None and saved.value > share and point.entry.record.verdict == "neutral":
            name = CodeText(text=point.entry.choice)
            return ("; ", name, " frees ", saved, " on a GPU, for copies to the host that a CPU cannot time")
    return ()


def _saved(point: TradeOff) -> float:
    return quantities.PEAK_SAVING.of(point.entry.record) or 0.0


def _added(point: TradeOff) -> float:
    return max(point.ratio.median - 1, 0.0)


def _complexity(entry: Entry) -> int:
    """Return 0 of the simplest; chunks and sharding come after every AC variant alone."""
    experiment = entry.record.experiment
    name = group_name(experiment, "ac")
    place = _SIMPLEST.index(name) if name in _SIMPLEST else len(_SIMPLEST)
    further = sum(group_name(experiment, group) not in {"none", "?"} for group in ("chunk", "shard"))
    return place + 10 * further


def _and(meshes: Sequence[str]) -> str:
    return " and ".join((", ".join(meshes[:-1]), meshes[-1])) if len(meshes) > 1 else meshes[0]
