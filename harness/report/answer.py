"""What a reader should take away, in sentences that follow from records: the answer stands first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.record import STATUSES, is_baseline
from harness.report.cells import ratio
from harness.report.document import Claim, Code, Line, Number, Part
from harness.report.front import Front, Point, front
from harness.report.sweep import Entry, Sweep
from harness.report.words import Unit
from harness.verdict import VERDICTS

MOST_SETTINGS = 6
"""More models, meshes and recipes than these are left to the tables."""

_MOST_NAMED = 4
_SHARE = "memory/peak_bytes : memory/baseline/peak_bytes"


def answer(sweep: Sweep) -> tuple[Claim, ...]:
    """Return how the sweep ended, and what is best in each of its settings, the best examined first."""
    settings = sorted(sweep.by_setting.values(), key=len, reverse=True)
    claims = [claim for entries in settings[:MOST_SETTINGS] for claim in _of_setting(entries)]
    return (*claims, *_overview(sweep))


def place(entry: Entry) -> str:
    """Return where a trial ran: device, model, ranks."""
    environment = entry.record.environment
    ranks = entry.value("experiment/mesh/dp_replicate") or 1
    for size in ("dp_shard", "tp"):
        ranks *= entry.value(f"experiment/mesh/{size}") or 1
    device = environment.get("device") or "an unknown device"
    return f"{device}, {entry.model}, {ranks} {'rank' if ranks == 1 else 'ranks'} ({entry.mesh})"


def _of_setting(entries: Sequence[Entry]) -> Iterator[Claim]:
    found = front(entries)
    offers = [point for point in found.best if not is_baseline(point.entry.record.experiment)]
    if offers:
        yield from _offers(found, offers)
        yield from _dominated(found)
        return
    smallest = min(
        (entry for entry in entries if _is_offer(entry)),
        key=lambda entry: entry.record.memory.peak_bytes if entry.record.memory else 0,
        default=None,
    )
    if smallest is not None:
        yield Claim(
            line=(f"On {place(smallest)}: ", *_keeps(smallest), "; its time was not measured."),
            trial_ids=(smallest.trial_id,),
        )


def _offers(found: Front, offers: Sequence[Point]) -> Iterator[Claim]:
    """Yield what keeps least memory, and what costs least time among all that is not dominated."""
    least, quickest = offers[0].entry, min(offers, key=lambda point: point.ratio.median).entry
    compared = tuple(point.entry.trial_id for point in found.points)
    lowest = f": the lowest peak of {len(compared)} trials." if len(compared) > 1 else "."
    yield Claim(line=(f"On {place(least)}: ", *_keeps(least), *_at_time(least), lowest), trial_ids=compared)
    if quickest is not least:
        yield Claim(
            line=("There, ", *_keeps(quickest), *_at_time(quickest), ": the quickest that saves."),
            trial_ids=compared,
        )


def _dominated(found: Front) -> Iterator[Claim]:
    """Yield one sentence a dominating trial, with what needs neither less memory nor less time."""
    losers: dict[str, list[Point]] = {}
    for point in found.points:
        by = found.dominated.get(point.entry.trial_id)
        if by is not None and not is_baseline(point.entry.record.experiment):
            losers.setdefault(by.entry.trial_id, []).append(point)
    for trial_id, points in losers.items():
        by = found.dominated[points[0].entry.trial_id]
        line: list[Part] = [Code(text=by.entry.variant), " dominates "]
        for index, point in enumerate(points[:_MOST_NAMED]):
            line += [", " if index else "", Code(text=point.entry.variant), " (", *_peak(point.entry)]
            line += [" at ", *ratio(point.entry), ")"]
        more = len(points) - _MOST_NAMED
        others = f" and {more} more" if more > 0 else ""
        yield Claim(
            line=(*line, f"{others}: neither less memory nor less time."),
            trial_ids=(trial_id, *(point.entry.trial_id for point in points)),
        )


def _overview(sweep: Sweep) -> Iterator[Claim]:
    """Yield how many trials there are and how they ended, what went wrong in words."""
    records = sweep.records
    line: list[str | Number] = [_count(len(records), "records"), f" {_trials(len(records))}"]
    for key, values in (("status", STATUSES), ("verdict", VERDICTS)):
        for value in values:
            count = sum(getattr(record, key) == value for record in records)
            if count:
                line += [": " if value == _first(records, key, values) and key == "status" else ", "]
                line += [_count(count, f"{key}={value}"), f" {value}"]
    if sweep.waiting:
        line += [f"; {len(sweep.waiting)} without a record yet"]
    if sweep.unreadable:
        line += [f"; {len(sweep.unreadable)} unreadable"]
    yield Claim(line=(*line, "."), trial_ids=tuple(record.trial_id for record in records))


def _first(records: Sequence[object], key: str, values: Sequence[str]) -> str:
    present = {getattr(record, key) for record in records}
    return next(value for value in values if value in present)


def _count(count: int, what: str) -> Number:
    return Number(value=count, unit=Unit.COUNT, path=f"count {what}")


def _trials(count: int) -> str:
    return "trial" if count == 1 else "trials"


def _is_offer(entry: Entry) -> bool:
    record = entry.record
    measured = record.memory is not None and record.memory.baseline is not None
    return measured and record.verdict == "neutral" and not is_baseline(record.experiment)


def _keeps(entry: Entry) -> Line:
    share, baseline = entry.number(_SHARE, Unit.SHARE), entry.number("memory/baseline/peak_bytes", Unit.BYTES)
    if share is None or baseline is None:
        return (Code(text=entry.variant), " needs ", *_peak(entry))
    return (
        Code(text=entry.variant),
        " keeps ",
        share,
        " of the peak memory (",
        *_peak(entry),
        " of ",
        baseline,
        ")",
    )


def _at_time(entry: Entry) -> Line:
    line = ratio(entry)
    if isinstance(line[0], Number):
        return (" at ", *line, " the step time")
    return (" at a step time that cannot be told from the plain model's", *line[1:])


def _peak(entry: Entry) -> Line:
    peak = entry.number("memory/peak_bytes", Unit.BYTES)
    assert peak is not None, "only measured trials are compared"
    return (peak,)
