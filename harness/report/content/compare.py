"""What changed between two sweeps: before and after, two machines, two versions of torch; changes first."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.records.statistics import Ratio
from harness.report.content.columns import NOTHING
from harness.report.content.contents import partial, subtitle
from harness.report.model.document import Claim, Document, Line, Mark, Number, Section, Table, Trial, plain
from harness.report.model.number_words import Unit
from harness.report.model.sweep import Entry, Sweep

_EXACT = {
    "saved": ("memory/saved_bytes", Unit.BYTES),
    "peak": ("memory/peak_bytes", Unit.BYTES),
    "recomputed FLOPs": ("work/recomputed_flops", Unit.FLOPS),
}
_RATIO = "time/ratio_to_baseline"
_LARGEST = _EXACT | {"step time vs baseline": (f"{_RATIO}/median", Unit.RATIO)}
_WORST_FIRST = ("differs", "inert", "unverified", "neutral")
_MOST_NAMED = 4
_ARROW = " → "
_SHOWN_ENVIRONMENT = ("device", "torch", "cuda", "driver", "python", "commit")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """The same experiment in two sweeps.

    Fields:
        before, after: its records.
        changed: columns in which they differ; times differ where their intervals do not meet.
    """

    before: Entry
    after: Entry
    changed: tuple[str, ...]


def compare(before: Sweep, after: Sweep) -> Document:
    """Return the report on what changed.

    Trials are the same where their trial_id is, or where they agree in every option that both sweeps have:
    a version that adds an option addresses all its trials anew.
    """
    if before.name == after.name:
        before, after = (
            replace(before, name=f"{before.name}, before"),
            replace(after, name=f"{after.name}, after"),
        )
    pairs = [_pair(one, other) for one, other in _matched(before, after)]
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
        answer=tuple(_answer(pairs, changed, before, after)),
        sections=tuple(section for section in sections if section.items),
    )


def _matched(before: Sweep, after: Sweep) -> Iterator[tuple[Entry, Entry]]:
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
    found: dict[frozenset[tuple[str, str]], list[Entry]] = {}
    for entry in entries:
        key = frozenset(option for option in _options(entry.record.experiment) if option[0] in shared)
        found.setdefault(key, []).append(entry)
    return {key: each[0] for key, each in found.items() if len(each) == 1}


def _options(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if not isinstance(value, Mapping):
        yield path, json.dumps(value)
        return
    for key, item in value.items():
        yield from _options(item, f"{path}/{key}")


def _pair(before: Entry, after: Entry) -> Pair:
    changed = [
        name for name in ("status", "verdict") if getattr(before.record, name) != getattr(after.record, name)
    ]
    changed += [name for name, (path, _) in _EXACT.items() if before.value(path) != after.value(path)]
    if before.value("work/collectives") != after.value("work/collectives"):
        changed.append("collectives")
    if _are_apart(before.value(_RATIO), after.value(_RATIO)):
        changed.append("step time vs baseline")
    return Pair(before=before, after=after, changed=tuple(changed))


def _are_apart(one: Ratio | None, other: Ratio | None) -> bool:
    """Whether two ratios differ beyond their intervals, or one of them is missing."""
    if one is None or other is None:
        return one is not other
    return one.high < other.low or other.high < one.low


def _answer(pairs: Sequence[Pair], changed: Sequence[Pair], before: Sweep, after: Sweep) -> Iterator[Claim]:
    columns = list(dict.fromkeys(name for pair in changed for name in pair.changed))
    counts = [f"{name} of {sum(name in pair.changed for pair in changed)}" for name in columns]
    what = f": {', '.join(counts)}" if counts else ""
    yield Claim(
        line=(f"{len(changed)} of {len(pairs)} trials in both sweeps changed{what}.",),
        trial_ids=tuple(pair.before.trial_id for pair in changed),
    )
    renamed = sum(pair.before.trial_id != pair.after.trial_id for pair in pairs)
    if renamed:
        line = f"{renamed} of them are the same but for options that only one of the sweeps has."
        yield Claim(line=(line,), trial_ids=())
    lost = [pair for pair in changed if _rank(pair.after) < _rank(pair.before)]
    for pair in lost[:_MOST_NAMED]:
        was, now = (_ending(entry) for entry in (pair.before, pair.after))
        yield Claim(line=(pair.before.trial, f": {was}{_ARROW}{now}."), trial_ids=(pair.before.trial_id,))
    if len(lost) > _MOST_NAMED:
        yield Claim(line=(f"{len(lost)} trials in all ended worse.",), trial_ids=())
    for name, (path, unit) in _LARGEST.items():
        yield from _largest(name, path, unit, [pair for pair in changed if name in pair.changed])
    alone = [len(sweep.entries) - len(pairs) for sweep in (before, after)]
    if any(alone):
        line = f"{alone[0]} {_are(alone[0])} only in {before.name}, {alone[1]} only in {after.name}."
        yield Claim(line=(line,), trial_ids=())


def _rank(entry: Entry) -> int:
    """Return how well a trial ended: neutral best, then without a comparison, inert, different, no result."""
    return _WORST_FIRST.index(entry.record.verdict) if entry.record.status == "ok" else -1


def _ending(entry: Entry) -> str:
    return entry.record.verdict if entry.record.status == "ok" else entry.record.status


def _largest(name: str, path: str, unit: Unit, pairs: Sequence[Pair]) -> Iterator[Claim]:
    """Yield where a number has changed most, as a quotient, among those that are above zero in both."""
    known = [
        (pair, one, other)
        for pair in pairs
        if (one := pair.before.number(path, unit)) is not None
        and (other := pair.after.number(path, unit)) is not None
        and min(one.value, other.value) > 0
    ]
    if known:
        pair, one, other = max(known, key=lambda found: abs(math.log(found[2].value / found[1].value)))
        line: Line = (
            f"The {name} that changed most is that of ",
            pair.before.trial,
            ": ",
            one,
            _ARROW,
            other,
        )
        yield Claim(line=(*line, "."), trial_ids=(pair.before.trial_id,))


def _are(count: int) -> str:
    return "trial is" if count == 1 else "trials are"


def _tables(key: str, title: str, pairs: Sequence[Pair]) -> tuple[Table, ...]:
    if not pairs:
        return ()
    columns = ("trial", "changed", "status", "verdict", *_EXACT, "step time vs baseline")
    rows: tuple[tuple[Line, ...], ...] = tuple(
        (
            (pair.before.trial,),
            (", ".join(pair.changed) or NOTHING,),
            *(_marks(pair, name) for name in ("status", "verdict")),
            *(_numbers(pair, path, unit) for path, unit in _EXACT.values()),
            _ratios(pair),
        )
        for pair in pairs
    )
    return (Table(key=key, title=title, columns=columns, rows=rows),)


def _marks(pair: Pair, name: str) -> Line:
    one, other = (Mark(text=getattr(entry.record, name)) for entry in (pair.before, pair.after))
    return (one,) if one == other else (one, _ARROW, other)


def _numbers(pair: Pair, path: str, unit: Unit) -> Line:
    """Return one number where both are equal."""
    one, other = pair.before.number(path, unit), pair.after.number(path, unit)
    if one is not None and other is not None and one.value == other.value:
        return (one,)
    return (one or NOTHING,) if one is other else (one or NOTHING, _ARROW, other or NOTHING)


def _ratios(pair: Pair) -> Line:
    one, other = _interval(pair.before), _interval(pair.after)
    return one if plain(one) == plain(other) == NOTHING else (*one, _ARROW, *other)


def _interval(entry: Entry) -> Line:
    median = entry.number(f"{_RATIO}/median", Unit.RATIO)
    low, high = (entry.number(f"{_RATIO}/{name}", Unit.BOUND) for name in ("low", "high"))
    if median is None or low is None or high is None:
        return (NOTHING,)
    return (median, " [", low, ", ", high, "]")


def _alone(before: Sweep, after: Sweep, pairs: Sequence[Pair]) -> tuple[Table, ...]:
    both = {(entry.sweep, entry.trial_id) for pair in pairs for entry in (pair.before, pair.after)}
    rows: list[tuple[Line, ...]] = [
        (
            (Trial(name=entry.name, trial_id=entry.trial_id),),
            (sweep.name,),
            (Mark(text=entry.record.status),),
            _peak(entry),
        )
        for sweep in (before, after)
        for entry in sweep.entries
        if (entry.sweep, entry.trial_id) not in both
    ]
    if not rows:
        return ()
    columns = ("trial", "sweep", "status", "peak")
    return (Table(key="alone-trials", title="In one sweep only", columns=columns, rows=tuple(rows)),)


def _peak(entry: Entry) -> Line:
    peak: Number | None = entry.number("memory/peak_bytes", Unit.BYTES)
    return (peak or NOTHING,)


def _environments(before: Sweep, after: Sweep) -> Table:
    rows = [
        (
            (key,),
            *(
                (
                    ", ".join(
                        sorted({str(record.environment.get(key) or NOTHING) for record in sweep.records})
                    ),
                )
                for sweep in (before, after)
            ),
        )
        for key in _SHOWN_ENVIRONMENT
    ]
    return Table(
        key="environments", title="Environments", columns=("what", before.name, after.name), rows=tuple(rows)
    )
