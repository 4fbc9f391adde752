"""What a reader should take away, in sentences that follow from records: the answer stands first."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from harness.records.record import STATUSES, is_baseline
from harness.records.verdict import VERDICTS
from harness.report.content.columns import first_line, mark, notes, number_cell, ratio
from harness.report.content.pareto import ParetoFront, TradeOff, pareto_front
from harness.report.content.plan_notes import plan_notes
from harness.report.facts import quantities
from harness.report.facts.baseline import baseline, is_sharded, of_baseline
from harness.report.facts.document import CodeText, Line, LinePart, Number, Statement
from harness.report.facts.labels import mesh_sizes
from harness.report.facts.number_words import Unit, and_more
from harness.report.facts.sweep_records import Entry, SweepRecords, grouped, sentence

MOST_SETTINGS = 6
"""More models, meshes and recipes than these are left to the tables."""

_WORDS_FOR = {"inert": " does nothing: ", "unverified": " is "}
_MOST_NAMED = 4
_COMMIT = re.compile(r"\b([0-9a-f]{10})[0-9a-f]{30}\b")
_ENVIRONMENT = ("torch", "cuda", "driver", "python", "cpus", "commit")


def answer(sweep: SweepRecords) -> tuple[Statement, ...]:
    """Return what is best in each setting, the best examined first, what is wrong, and how trials ended."""
    settings = sorted(sweep.by_setting.items(), key=lambda item: -_measured(item[1]))[:MOST_SETTINGS]
    places = _places(sweep, [setting for setting, _ in settings])
    best = (statement for setting, entries in settings for statement in _of_setting(entries, places[setting]))
    return (*best, *_remarked(sweep), *_untrusted(sweep), *_overview(sweep), *_failed(sweep))


def _measured(entries: Sequence[Entry]) -> int:
    return sum(entry.record.memory is not None for entry in entries)


def _places(sweep: SweepRecords, settings: Sequence[str]) -> dict[str, str]:
    """Return where and how each setting ran; environments are told apart where nothing else does it."""
    first = {setting: sweep.by_setting[setting][0] for setting in settings}
    found = {setting: _place(entry) for setting, entry in first.items()}
    for setting in _alike(found):
        environment = first[setting].record.environment
        versions = [f"{key} {environment.get(key)}" for key in _differing(first.values())]
        found[setting] = ", ".join([found[setting], *(_COMMIT.sub(r"\1", each) for each in versions)])
    for setting in _alike(found):
        found[setting] += f", environment {first[setting].record.environment_id}"
    return found


def _alike(places: Mapping[str, str]) -> list[str]:
    shared = {place for place, count in Counter(places.values()).items() if count > 1}
    return [setting for setting, place in places.items() if place in shared]


def _differing(entries: Iterable[Entry]) -> list[str]:
    environments = [entry.record.environment for entry in entries]
    return [key for key in _ENVIRONMENT if len({str(each.get(key)) for each in environments}) > 1]


def _place(entry: Entry) -> str:
    """Return where a trial ran, and with which options: device, model, ranks."""
    ranks = math.prod(mesh_sizes(entry.record.experiment))
    device = entry.record.environment.get("device") or "an unknown device"
    others = f", {entry.other_fields}" if entry.other_fields else ""
    return f"{device}, {entry.model}, {ranks} {'rank' if ranks == 1 else 'ranks'} ({entry.mesh}){others}"


def _of_setting(entries: Sequence[Entry], place: str) -> Iterator[Statement]:
    found = pareto_front(entries)
    compared = [point.entry for point in found.points]
    tried = [point for point in found.points if not is_baseline(point.entry.record.experiment)]
    saving = [point for point in tried if _saves(point.entry)]
    if saving:
        yield from _offers(found, saving, place)
    elif tried:
        nothing = f"On {place}: nothing timed saves peak memory; "
        yield sentence(nothing, *_keeps(tried[0].entry), *_at_time(tried[0].entry), ".", of=compared)
    elif compared:
        needs: Line = (*_named(entries), " needs ", *_peak(compared[0]))
        yield sentence(f"On {place}: ", *needs, "; no other trial has numbers.", of=compared[:1])
    yield from _untimed(entries, saving, place)
    yield from _dominated(found)


def _named(entries: Sequence[Entry]) -> Line:
    """Return the words for a baseline: beside sharded trials it is sharded by the mesh."""
    is_one_of_them = any(is_sharded(entry.record.experiment) for entry in entries)
    return (CodeText(text="shard=none"),) if is_one_of_them else ("the plain model",)


def _untimed(entries: Sequence[Entry], saving: Sequence[TradeOff], place: str) -> Iterator[Statement]:
    """Yield what needs less memory than all that was timed."""
    measured = [entry for entry in entries if entry.record.time is None and _is_offer(entry)]
    smallest = min(measured, key=_peak_bytes, default=None)
    if smallest is None or (saving and saving[0].peak_bytes <= _peak_bytes(smallest)):
        return
    where = "There, " if saving else f"On {place}: "
    yield sentence(where, *_keeps(smallest), "; its time was not measured.", of=[smallest])


def _offers(found: ParetoFront, saving: Sequence[TradeOff], place: str) -> Iterator[Statement]:
    """Yield what keeps least memory, and what costs least time among what saves any."""
    best = [point for point in saving if point.entry.trial_id not in found.dominated] or saving
    least, quickest = best[0], min(best, key=lambda point: point.ratio.median)
    equal = [point for point in best[1:] if point.peak_bytes == least.peak_bytes]
    compared = [point.entry for point in found.points]
    shared = _shared(equal, len(compared)) if len(compared) > 1 else (".",)
    yield sentence(f"On {place}: ", *_keeps(least.entry), *_at_time(least.entry), *shared, of=compared)
    if quickest is not least and quickest not in equal:
        pace = _pace(quickest, least, saving)
        yield sentence("There, ", *_keeps(quickest.entry), *_at_time(quickest.entry), *pace, of=compared)


def _shared(equal: Sequence[TradeOff], count: int) -> Iterator[LinePart]:
    """Yield of how many trials a peak is the lowest, and which others have it in a time as good."""
    yield f": the lowest peak of {count} trials"
    for index, point in enumerate(equal[:_MOST_NAMED]):
        yield ", " if index else ", shared with "
        yield CodeText(text=point.entry.choice)
        yield from (" (", *ratio(point.entry), ")")
    yield "."


def _pace(quickest: TradeOff, least: TradeOff, saving: Sequence[TradeOff]) -> Iterator[LinePart]:
    """Yield what may be said of the lowest time: intervals that meet rank nothing."""
    if quickest.ratio.high >= least.ratio.low:
        yield from (": not clearly quicker than ", CodeText(text=least.entry.choice), ".")
    elif all(quickest.ratio.high < point.ratio.low for point in saving if point is not quickest):
        yield ": the quickest that saves."
    else:
        yield ": nothing that saves is clearly quicker."


def _dominated(found: ParetoFront) -> Iterator[Statement]:
    """Yield one sentence a dominating trial, with what needs neither less memory nor less time."""
    losers = grouped(
        (by.entry.trial_id, point)
        for point in found.points
        if (by := found.dominated.get(point.entry.trial_id)) is not None
        and not is_baseline(point.entry.record.experiment)
    )
    for points in losers.values():
        by = found.dominated[points[0].entry.trial_id]
        line: list[LinePart] = [CodeText(text=by.entry.choice), " dominates "]
        for index, point in enumerate(points[:_MOST_NAMED]):
            line += [", " if index else "", CodeText(text=point.entry.choice), " (", *_peak(point.entry)]
            line += [" at ", *ratio(point.entry), ")"]
        others = f"{and_more(len(points) - _MOST_NAMED)}: neither less memory nor less time."
        yield sentence(*line, others, of=[by.entry, *(point.entry for point in points)])


def _untrusted(sweep: SweepRecords) -> Iterator[Statement]:
    """Yield what computes something else than its baseline, what does nothing, and what proves nothing."""
    for verdict in ("differs", "inert", "unverified"):
        found = [entry for entry in sweep.entries if entry.record.verdict == verdict]
        if verdict == "unverified":  # of what ended early, or had no twin, another sentence tells
            found = [entry for entry in found if entry.record.reason is not None]
        for entry in found[:_MOST_NAMED]:
            reason = next((note for note in notes(entry.record)), "no part is named")
            why = _apart(entry) if verdict == "differs" else (_WORDS_FOR[verdict],)
            yield sentence(entry.trial, *why, f"{reason.removeprefix('parity: ')}.", of=[entry])
        if len(found) > _MOST_NAMED:
            count = _count(len(found), f"verdict={verdict}")
            yield sentence(count, f" trials in all are of the verdict {verdict}.", of=found)


def _apart(entry: Entry) -> Line:
    return (" differs from ", *baseline(entry.record.experiment), ": ")


def _remarked(sweep: SweepRecords) -> Iterator[Statement]:
    """Yield what became of plans; of trials that do nothing it is said with that."""
    remarked = [entry for entry in sweep.entries if entry.record.verdict != "inert"]
    groups = grouped((remark, entry) for entry in remarked for remark in plan_notes(entry.record))
    for remark, entries in list(groups.items())[:_MOST_NAMED]:
        yield sentence(entries[0].trial, f"{and_more(len(entries) - 1)}: {remark}.", of=entries)


def _failed(sweep: SweepRecords) -> Iterator[Statement]:
    """Yield the most frequent reasons why trials did not end well, each with a trial that it ended."""
    groups = grouped(
        (f"{entry.record.status}, {error.kind}: {first_line(error)}", entry)
        for entry in sweep.entries
        if (error := entry.record.error) is not None
    )
    for reason, entries in sorted(groups.items(), key=lambda item: -len(item[1]))[:_MOST_NAMED]:
        yield sentence(entries[0].trial, f"{and_more(len(entries) - 1)}: {reason}", of=entries)


def _overview(sweep: SweepRecords) -> Iterator[Statement]:
    """Yield how many trials there are and how they ended, what went wrong in words."""
    records = sweep.records
    statuses = Counter(record.status for record in records)
    verdicts = Counter(record.verdict for record in records)
    ends = [(f"status={value}", value, statuses[value]) for value in STATUSES if statuses[value]]
    ends += [(f"verdict={value}", value, verdicts[value]) for value in VERDICTS if verdicts[value]]
    line: list[LinePart] = [_count(len(records), "records"), " trial" if len(records) == 1 else " trials"]
    for index, (what, value, count) in enumerate(ends):
        line += [", " if index else ": ", _count(count, what), f" {value}"]
    yield sentence(*line, f"{_without_record(sweep)}.", of=sweep.entries)


def _without_record(sweep: SweepRecords) -> str:
    """Return how many trials have no record, or one that cannot be read."""
    yet = "interrupted: the same command continues them" if sweep.is_abandoned else "without a record yet"
    waiting = f"; {len(sweep.waiting)} {yet}" if sweep.waiting else ""
    return f"{waiting}; {len(sweep.unreadable)} unreadable" if sweep.unreadable else waiting


def _count(count: int, what: str) -> Number:
    return Number(value=count, unit=Unit.COUNT, path=f"count {what}")


def _saves(entry: Entry) -> bool:
    share = quantities.PEAK_SHARE.of(entry.record)
    return share is not None and share < 1


def _is_offer(entry: Entry) -> bool:
    return entry.record.verdict == "neutral" and not is_baseline(entry.record.experiment) and _saves(entry)


def _peak_bytes(entry: Entry) -> int:
    assert entry.record.memory is not None, "only measured trials are compared"
    return entry.record.memory.peak_bytes


def _keeps(entry: Entry) -> Line:
    share, whole = entry.number(quantities.PEAK_SHARE), entry.number(quantities.BASELINE_PEAK)
    shown = mark(entry).text
    name: Line = (CodeText(text=entry.choice), "" if shown == "neutral" else f" ({shown})")
    if share is None or whole is None:
        return (*name, " needs ", *_peak(entry))
    experiment = entry.record.experiment
    of: Line = (" of ", *baseline(experiment)) if is_sharded(experiment) else ()
    needs = " keeps " if share.value < 1 else " needs "
    return (*name, needs, share, " of the peak memory", *of, " (", *_peak(entry), " of ", whole, ")")


def _at_time(entry: Entry) -> Line:
    line = ratio(entry)
    if isinstance(line[0], Number):
        return (" at ", *line, " the step time")
    return (" at a step time that cannot be told from ", *of_baseline(entry.record.experiment), *line[1:])


def _peak(entry: Entry) -> Line:
    return number_cell(entry, quantities.PEAK)
