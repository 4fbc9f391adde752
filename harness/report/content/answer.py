"""The conclusion of a report, in sentences that follow from records: five of a workload at most."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from harness.records.record import STATUSES, Record
from harness.records.verdict import VERDICTS
from harness.report.content.columns import number_cell, ratio
from harness.report.content.recommendation import at_time, baseline_among, is_offer, recommendation
from harness.report.facts import quantities
from harness.report.facts.baseline import baseline, is_sharded
from harness.report.facts.document import NOTHING, CodeText, Line, LinePart, Number, Statement
from harness.report.facts.labels import fields_that_differ, mesh_sizes
from harness.report.facts.number_words import NumberUnit, and_more
from harness.report.facts.pareto import ParetoFront, TradeOff
from harness.report.facts.sweep_records import Entry, SweepRecords, is_on_cpu, sentence
from harness.report.facts.trial_notes import first_line
from harness.report.facts.workloads import MOST_WORKLOADS, measured_count, workloads

_WORDS_FOR = {"inert": " does nothing: ", "unverified": " is "}
_MOST_NAMED = 4
_MOST_VALUES = 6
_SIZES = {"batch_size": "batch size", "sequence_length": "sequence length"}


def answer(sweep: SweepRecords) -> tuple[Statement, ...]:
    """Return what to use, what was trained, and at most two sentences on the best examined mesh.

    Args:
        sweep: the trials of one workload.
    """
    settings, fronts = _settings(sweep)
    if not settings:
        return ()
    place = f"On {settings[0][0].mesh}, " if len(settings) > 1 else ""
    first = recommendation(fronts, names_meshes=bool(place))
    return (*first, _what_was_trained(sweep), *list(_of_setting(settings[0], fronts[0], place))[:2])


def advice(sweep: SweepRecords) -> tuple[Statement, ...]:
    """Return what to use, of each of the workloads with the most trials."""
    return tuple(
        replace(each, line=(f"{workload.name}: ", *each.line)) if len(found) > 1 else each
        for found in [workloads(sweep)]
        for workload in found[:MOST_WORKLOADS]
        for fronts in [_settings(workload.sweep)[1]]
        for each in recommendation(fronts, names_meshes=len(fronts) > 1)
    )


def _settings(sweep: SweepRecords) -> tuple[list[Sequence[Entry]], list[ParetoFront]]:
    """Return the trials of each mesh, that with the most measured ones first, and their fronts."""
    settings: list[Sequence[Entry]] = sorted(
        sweep.by_setting.values(), key=lambda entries: -measured_count(entries)
    )
    return settings, [sweep.fronts[entries[0].setting] for entries in settings]


def _ends(records: Sequence[Record]) -> list[tuple[str, str, int]]:
    """Return a filter of the table, a status or verdict, and how many trials have it."""
    statuses = Counter(record.status for record in records)
    is_plan = statuses["predicted"] == len(records)  # which shows nothing
    verdicts = Counter() if is_plan else Counter(record.verdict for record in records)
    ends = [(f"status={value}", value, statuses[value]) for value in STATUSES if statuses[value]]
    return ends + [(f"verdict={value}", value, verdicts[value]) for value in VERDICTS if verdicts[value]]


def ending(sweep: SweepRecords) -> tuple[Statement, ...]:
    """Return how all trials ended, with the first that must not be trusted and the first that failed."""
    records = sweep.records
    line: list[LinePart] = [_count(len(records), "records"), " trial" if len(records) == 1 else " trials"]
    for index, (what, value, count) in enumerate(_ends(records)):
        line += [", " if index else ": ", _count(count, what), f" {value}"]
    troubles = [part for trouble in (*_untrusted(sweep), *_failed(sweep)) for part in ("; ", *trouble)]
    return (sentence(*line, _without_record(sweep), *troubles, ".", of=sweep.entries),)


def differing(experiments: Sequence[Mapping[str, Any]]) -> Line:
    """Return which fields differ between the trials, each with its values."""
    line: list[LinePart] = []
    for name, values in fields_that_differ(experiments).items():
        shown = f"{', '.join(values[:_MOST_VALUES])}{and_more(len(values) - _MOST_VALUES)}"
        line += ["; " if line else "Trials differ in ", CodeText(text=name), f": {shown}"]
    return (*line, ".") if line else ()


def _what_was_trained(sweep: SweepRecords) -> Statement:
    measured = [entry for entry in sweep.entries if entry.record.memory is not None]
    first = (measured or sweep.entries)[0]
    experiment = first.experiment
    parts: list[LinePart] = [first.model]
    size = first.number(quantities.PARAMETERS)
    if size is not None:
        ranks = " a rank" if math.prod(mesh_sizes(experiment)) > 1 else ""
        parts += [" with ", size, f" of parameters{ranks}"]
    found = [f"{words} {experiment[key]}" for key, words in _SIZES.items() if key in experiment]
    found += [str(experiment[key]) for key in ("dtype", "optimizer") if experiment.get(key)]
    others = f", {first.other_fields}" if first.other_fields else ""
    parts += ["".join(f", {each}" for each in found), others, f", {_where(first.record)}: {_meshes(sweep)}."]
    return replace(sentence(*parts, of=sweep.entries), is_setting=True)


def _where(record: Record) -> str:
    if record.outlook is not None:
        return f"predicted for {record.outlook.hardware or 'any hardware'}"
    device = record.environment.get("device") or "an unknown device"
    return f"on {device}{' (CPU)' if is_on_cpu(record) and device != 'cpu' else ''}"


def _meshes(sweep: SweepRecords) -> str:
    """Return the ranks of each mesh: `1 rank (single), 2 ranks (shard2)`."""
    sizes = {entry.mesh: math.prod(mesh_sizes(entry.record.experiment)) for entry in sweep.entries}
    words = [f"{count} {'rank' if count == 1 else 'ranks'} ({mesh})" for mesh, count in sizes.items()]
    return f"{', '.join(words[:_MOST_NAMED])}{and_more(len(words) - _MOST_NAMED)}"


def _of_setting(entries: Sequence[Entry], found: ParetoFront, place: str) -> Iterator[Statement]:
    """Yield what saves most, then what needs less and was not timed, or costs less time."""
    compared = [point.entry for point in found.points]
    tried = [point for point in found.points if not point.entry.is_baseline]
    saving = [point for point in tried if (quantities.PEAK_SAVING.of(point.entry.record) or 0) > 0]
    if saving:
        yield from _offers(found, saving, place)
    elif tried:
        nothing = f"{place}nothing timed saves peak memory; "
        needs = (*_saving(tried[0].entry), *at_time(tried[0].entry))
        yield sentence(nothing, *needs, ".", of=compared)
    elif compared:
        needs = (baseline_among(entries), " needs ", *number_cell(compared[0], quantities.PEAK))
        only = "" if found.as_on_gpu else "; no other trial has numbers"
        yield sentence(place, *needs, only, ".", of=compared[:1])
    yield from _untimed(entries, saving, place)
    yield from _quickest(found, saving)


def _untimed(entries: Sequence[Entry], saving: Sequence[TradeOff], place: str) -> Iterator[Statement]:
    untimed = [entry for entry in entries if entry.record.time is None and not entry.is_as_on_gpu]
    measured = list(filter(is_offer, untimed))
    smallest = min(measured, key=_peak_bytes, default=None)
    if smallest is None or (saving and saving[0].peak_bytes <= _peak_bytes(smallest)):
        return
    where = "There, " if saving and place else place
    yield sentence(where, *_saving(smallest), "; its time was not measured.", of=[smallest])


def _offers(found: ParetoFront, saving: Sequence[TradeOff], place: str) -> Iterator[Statement]:
    best = _best(found, saving)
    least, compared = best[0], [point.entry for point in found.points]
    equal = [point for point in best[1:] if point.peak_bytes == least.peak_bytes]
    shared = _shared(equal, len(compared)) if len(compared) > 1 else ()
    yield sentence(place, *_saving(least.entry), *at_time(least.entry), *shared, ".", of=compared)


def _best(found: ParetoFront, saving: Sequence[TradeOff]) -> Sequence[TradeOff]:
    return [point for point in saving if point.entry.trial_id not in found.dominated] or saving


def _shared(equal: Sequence[TradeOff], count: int) -> Iterator[LinePart]:
    """Yield of how many trials a peak is the lowest, and which others have it in a time as good."""
    yield f": the lowest peak of {count} trials"
    for index, point in enumerate(equal[:_MOST_NAMED]):
        yield ", " if index else ", shared with "
        yield CodeText(text=point.entry.choice)
        yield from (" (", *ratio(point.entry), ")")


def _quickest(found: ParetoFront, saving: Sequence[TradeOff]) -> Iterator[Statement]:
    if not saving:
        return
    best = _best(found, saving)
    least, quickest = best[0], min(best, key=lambda point: point.ratio.median)
    if quickest.peak_bytes == least.peak_bytes:
        return
    line = (*_saving(quickest.entry), *at_time(quickest.entry), *_pace(quickest, least, saving))
    yield sentence(*line, of=[point.entry for point in found.points])


def _pace(quickest: TradeOff, least: TradeOff, saving: Sequence[TradeOff]) -> Iterator[LinePart]:
    """Yield what may be said of the lowest time: intervals that meet rank nothing."""
    if quickest.ratio.high >= least.ratio.low:
        yield from (": not clearly quicker than ", CodeText(text=least.entry.choice), ".")
    elif all(quickest.ratio.high < point.ratio.low for point in saving if point is not quickest):
        yield ": the quickest that saves."
    else:
        yield ": nothing that saves is clearly quicker."


def _untrusted(sweep: SweepRecords) -> Iterator[Line]:
    """Yield what computes something else than its baseline, what does nothing, and what proves nothing."""
    for verdict in ("differs", "inert", "unverified"):
        found = [entry for entry in sweep.entries if entry.record.verdict == verdict]
        if verdict == "unverified":  # of what ended early, or had no twin, another sentence tells
            found = [entry for entry in found if entry.record.reason is not None]
        for entry in found[:1]:
            reason = next(iter(entry.notes), "no part is named")
            why: Line = (_WORDS_FOR.get(verdict, ""),)
            if verdict == "differs":
                why = (" differs from ", *baseline(entry.record.experiment), ": ")
            yield (entry.trial, and_more(len(found) - 1), *why, reason.removeprefix("parity: "))


def _failed(sweep: SweepRecords) -> Iterator[Line]:
    """Yield the most frequent reason why trials did not end well, with a trial that it ended."""
    reasons = {
        entry.trial_id: f"{entry.record.status}, {error.kind}: {first_line(error)}".rstrip(".: ")
        for entry in sweep.entries
        if (error := entry.record.error) is not None
    }
    for reason, count in Counter(reasons.values()).most_common(1):
        first = next(entry for entry in sweep.entries if reasons.get(entry.trial_id) == reason)
        yield (first.trial, f"{and_more(count - 1)}: {reason}")


def _without_record(sweep: SweepRecords) -> str:
    """Return how many trials have no record, or one that cannot be read."""
    yet = "interrupted: the same command continues them" if sweep.is_abandoned else "without a record yet"
    waiting = f"; {len(sweep.waiting)} {yet}" if sweep.waiting else ""
    return f"{waiting}; {len(sweep.unreadable)} unreadable" if sweep.unreadable else waiting


def _count(count: int, what: str) -> Number:
    return Number(value=count, unit=NumberUnit.COUNT, path=f"count {what}")


def _peak_bytes(entry: Entry) -> int:
    assert entry.record.memory is not None, "only measured trials are compared"
    return entry.record.memory.peak_bytes


def _saving(entry: Entry) -> Line:
    """Return `full saves 49% of the peak memory (24.2 MiB of 47.1 MiB)`, or what it needs."""
    saved, whole = entry.number(quantities.PEAK_SAVING), entry.number(quantities.BASELINE_PEAK)
    shown = entry.mark.text
    name: Line = (CodeText(text=entry.choice), "" if shown in {"neutral", NOTHING} else f" ({shown})")
    share, peak = entry.number(quantities.PEAK_SHARE), number_cell(entry, quantities.PEAK)
    if saved is None or share is None or whole is None:
        return (*name, " needs ", *peak)
    experiment = entry.record.experiment
    of: Line = (" of ", *baseline(experiment)) if is_sharded(experiment) else ()
    does: Line = (" saves ", saved) if saved.value > 0 else (" needs ", share)
    return (*name, *does, " of the peak memory", *of, " (", *peak, " of ", whole, ")")
