"""Changes between two sweeps: before and after, two machines, two versions of torch; changes first."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.records.record import Record
from harness.records.statistics import Ratio
from harness.report.content.columns import number_cell, ratio_with_interval
from harness.report.content.contents import partial, subtitle
from harness.report.facts import quantities
from harness.report.facts.document import NOTHING, Document, Line, Mark, Section, Statement, Table, plain
from harness.report.facts.quantities import Quantity
from harness.report.facts.sweep_records import Entry, SweepRecords, grouped, sentence

_EXACT = {"saved": quantities.SAVED, "peak": quantities.PEAK, "recomputed FLOPs": quantities.RECOMPUTED_FLOPS}
_LARGEST = _EXACT | {"step time vs baseline": quantities.RATIO}
_ENDINGS: Mapping[str, Callable[[Record], str]] = {
    "status": lambda record: record.status,
    "verdict": lambda record: record.verdict,
}
_COMPARED: Mapping[str, Callable[[Record], object]] = {
    **_ENDINGS,
    **{name: quantity.of for name, quantity in _EXACT.items()},
    "collectives": lambda record: record.work and record.work.collectives,
}
_WORST_FIRST = ("differs", "inert", "unverified", "neutral")
_MOST_NAMED = 4
_ARROW = " → "
_SHOWN_ENVIRONMENT = ("device", "torch", "cuda", "driver", "python", "commit")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """The same experiment in two sweeps.

    Fields:
        changed: columns in which they differ; times differ where their intervals do not meet.
    """

    before: Entry
    after: Entry
    changed: tuple[str, ...]


def changes(before: SweepRecords, after: SweepRecords) -> Document:
    """Return the report on what changed.

    Trials are the same where their trial_id is, or where they agree in every option that both sweeps have:
    a version that adds an option addresses all its trials anew.
    """
    if before.name == after.name:
        before = replace(before, name=f"{before.name}, before")
        after = replace(after, name=f"{after.name}, after")
    pairs = [_pair(one, other) for one, other in matched(before, after)]
    changed = [pair for pair in pairs if pair.changed]
    same = [pair for pair in pairs if not pair.changed]
    sections = (
        Section(key="changed", title="Changed", items=_tables("changed-trials", "Changed trials", changed)),
        Section(key="same", title="Unchanged", items=_tables("same-trials", "Unchanged trials", same)),
        Section(key="alone", title="In one sweep only", items=_alone(before, after, pairs)),
        Section(key="method", title="Environments", items=(_environments(before, after),)),
    )
    return Document(
        title=f"{before.name} → {after.name}",
        subtitle=(*subtitle(before), _ARROW, *subtitle(after)),
        partial=partial(before, after),
        answer=tuple(_answer(pairs, before, after)),
        sections=tuple(section for section in sections if section.items),
    )


def matched(before: SweepRecords, after: SweepRecords) -> Iterator[tuple[Entry, Entry]]:
    """Yield the trials that both sweeps have: by trial id, or by the options that both know."""
    same = {entry.trial_id: entry for entry in after.entries}
    known = {entry.trial_id for entry in before.entries}
    ours = [entry for entry in before.entries if entry.trial_id not in same]
    theirs = [entry for entry in after.entries if entry.trial_id not in known]
    shared = _options_of(ours) & _options_of(theirs)
    alike = _by_options(theirs, shared)
    same |= {entry.trial_id: alike[key] for key, entry in _by_options(ours, shared).items() if key in alike}
    return ((entry, same[entry.trial_id]) for entry in before.entries if entry.trial_id in same)


def _options_of(entries: Sequence[Entry]) -> set[str]:
    return {path for entry in entries for path, _ in _options(entry.record.experiment)}


def _by_options(entries: Sequence[Entry], shared: set[str]) -> dict[frozenset[tuple[str, str]], Entry]:
    """Return the trials by their options among `shared`; which of several is meant, nobody knows."""
    options = ((_options(entry.record.experiment), entry) for entry in entries)
    found = grouped((frozenset(each for each in of if each[0] in shared), entry) for of, entry in options)
    return {key: each[0] for key, each in found.items() if len(each) == 1}


def _options(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if not isinstance(value, Mapping):
        yield path, json.dumps(value)
        return
    for key, item in value.items():
        yield from _options(item, f"{path}/{key}")


def _pair(before: Entry, after: Entry) -> Pair:
    one, other = before.record, after.record
    changed = [name for name, of in _COMPARED.items() if of(one) != of(other)]
    if _are_apart(_ratio_of(one), _ratio_of(other)):
        changed.append("step time vs baseline")
    return Pair(before=before, after=after, changed=tuple(changed))


def _ratio_of(record: Record) -> Ratio | None:
    return None if record.time is None else record.time.ratio_to_baseline


def _are_apart(one: Ratio | None, other: Ratio | None) -> bool:
    """Return whether two ratios differ beyond their intervals, or one of them is missing."""
    if one is None or other is None:
        return one is not other
    return one.high < other.low or other.high < one.low


def _answer(pairs: Sequence[Pair], before: SweepRecords, after: SweepRecords) -> Iterator[Statement]:
    changed = [pair for pair in pairs if pair.changed]
    trials = [pair.before for pair in changed]
    counts = Counter(name for pair in changed for name in pair.changed)
    what = f": {', '.join(f'{name} of {count}' for name, count in counts.items())}" if counts else ""
    yield sentence(f"{len(changed)} of {len(pairs)} trials in both sweeps changed{what}.", of=trials)
    renamed = sum(pair.before.trial_id != pair.after.trial_id for pair in pairs)
    if renamed:
        yield sentence(f"{renamed} of them are the same but for options that only one of the sweeps has.")
    yield from _worsened(changed)
    for name, quantity in _LARGEST.items():
        yield from _largest(name, quantity, changed)
    yield from _in_one_only(len(pairs), before, after)


def _in_one_only(common: int, before: SweepRecords, after: SweepRecords) -> Iterator[Statement]:
    """Yield how many trials only one of the sweeps has, where both have `common` ones."""
    one, other = (len(sweep.entries) - common for sweep in (before, after))
    if one or other:
        are = "trial is" if one == 1 else "trials are"
        yield sentence(f"{one} {are} only in {before.name}, {other} only in {after.name}.")


def _worsened(changed: Sequence[Pair]) -> Iterator[Statement]:
    lost = [pair for pair in changed if _rank(pair.after) < _rank(pair.before)]
    for pair in lost[:_MOST_NAMED]:
        was, now = (_ending(entry) for entry in (pair.before, pair.after))
        yield sentence(pair.before.trial, f": {was}{_ARROW}{now}.", of=[pair.before])
    if len(lost) > _MOST_NAMED:
        yield sentence(f"{len(lost)} trials in all ended worse.")


def _rank(entry: Entry) -> int:
    """Return how well a trial ended: neutral best, then without a comparison, inert, different, no result."""
    return _WORST_FIRST.index(entry.record.verdict) if entry.record.status == "ok" else -1


def _ending(entry: Entry) -> str:
    return entry.record.verdict if entry.record.status == "ok" else entry.record.status


def _largest(name: str, quantity: Quantity, pairs: Sequence[Pair]) -> Iterator[Statement]:
    """Yield where a number has changed most, as a quotient, among those that are above zero in both."""
    known = [
        (pair, one, other)
        for pair in pairs
        if name in pair.changed
        and (one := pair.before.number(quantity)) is not None
        and (other := pair.after.number(quantity)) is not None
        and min(one.value, other.value) > 0
    ]
    if known:
        pair, one, other = max(known, key=lambda found: abs(math.log(found[2].value / found[1].value)))
        where = (f"The {name} that changed most is that of ", pair.before.trial, ": ")
        yield sentence(*where, one, _ARROW, other, ".", of=[pair.before])


def _tables(key: str, title: str, pairs: Sequence[Pair]) -> tuple[Table, ...]:
    if not pairs:
        return ()
    columns = ("trial", "changed", *_ENDINGS, *_EXACT, "step time vs baseline")
    rows: tuple[tuple[Line, ...], ...] = tuple(
        (
            (pair.before.trial,),
            (", ".join(pair.changed) or NOTHING,),
            *(_marks(pair, of) for of in _ENDINGS.values()),
            *(_numbers(pair, quantity) for quantity in _EXACT.values()),
            _ratios(pair),
        )
        for pair in pairs
    )
    return (Table(key=key, title=title, columns=columns, rows=rows),)


def _marks(pair: Pair, ending: Callable[[Record], str]) -> Line:
    one, other = (Mark(text=ending(entry.record)) for entry in (pair.before, pair.after))
    return (one,) if one == other else (one, _ARROW, other)


def _numbers(pair: Pair, quantity: Quantity) -> Line:
    one, other = pair.before.number(quantity), pair.after.number(quantity)
    if one is not None and other is not None and one.value == other.value:
        return (one,)
    return (one or NOTHING,) if one is other else (one or NOTHING, _ARROW, other or NOTHING)


def _ratios(pair: Pair) -> Line:
    one, other = ratio_with_interval(pair.before), ratio_with_interval(pair.after)
    return one if plain(one) == plain(other) == NOTHING else (*one, _ARROW, *other)


def _alone(before: SweepRecords, after: SweepRecords, pairs: Sequence[Pair]) -> tuple[Table, ...]:
    both = {(entry.sweep, entry.trial_id) for pair in pairs for entry in (pair.before, pair.after)}
    rows = tuple(
        (
            (entry.trial,),
            (sweep.name,),
            (Mark(text=entry.record.status),),
            number_cell(entry, quantities.PEAK),
        )
        for sweep in (before, after)
        for entry in sweep.entries
        if (entry.sweep, entry.trial_id) not in both
    )
    columns = ("trial", "sweep", "status", "peak")
    table = Table(key="alone-trials", title="In one sweep only", columns=columns, rows=rows)
    return (table,) if rows else ()


def _environments(before: SweepRecords, after: SweepRecords) -> Table:
    return Table(
        key="environments",
        title="Environments",
        columns=("what", before.name, after.name),
        rows=tuple(((key,), _values(before, key), _values(after, key)) for key in _SHOWN_ENVIRONMENT),
    )


def _values(sweep: SweepRecords, key: str) -> Line:
    return (", ".join(sorted({str(record.environment.get(key) or NOTHING) for record in sweep.records})),)
