"""What changed between two sweeps: before and after, two machines, two versions of torch; changes first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.report.cells import NOTHING
from harness.report.contents import subtitle
from harness.report.document import Claim, Document, Line, Mark, Number, Section, Table, Trial, plain
from harness.report.sweep import Entry, Sweep
from harness.report.words import Unit
from harness.statistics import Ratio

_EXACT = {
    "saved": ("memory/saved_bytes", Unit.BYTES),
    "peak": ("memory/peak_bytes", Unit.BYTES),
    "recomputed FLOPs": ("work/recomputed_flops", Unit.FLOPS),
}
_RATIO = "time/ratio_to_baseline"
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
    """Return the report on what changed; trials are the same where their trial_id is."""
    pairs = [_pair(one, other) for one, other in _matched(before, after)]
    changed = [pair for pair in pairs if pair.changed]
    same = [pair for pair in pairs if not pair.changed]
    sections = (
        Section(key="changed", title="Changed", items=_tables("changed-trials", "Changed trials", changed)),
        Section(key="same", title="Unchanged", items=_tables("same-trials", "Unchanged trials", same)),
        Section(key="alone", title="In one sweep only", items=_alone(before, after)),
        Section(key="method", title="Environments", items=(_environments(before, after),)),
    )
    return Document(
        title=f"{before.name} → {after.name}",
        subtitle=(*subtitle(before), _ARROW, *subtitle(after)),
        is_partial=bool(before.waiting or after.waiting),
        answer=tuple(_answer(pairs, changed, before, after)),
        sections=tuple(section for section in sections if section.items),
    )


def _matched(before: Sweep, after: Sweep) -> Iterator[tuple[Entry, Entry]]:
    found = {entry.trial_id: entry for entry in after.entries}
    return ((entry, found[entry.trial_id]) for entry in before.entries if entry.trial_id in found)


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
    alone = [len(sweep.entries) - len(pairs) for sweep in (before, after)]
    if any(alone):
        line = f"{alone[0]} trials are only in {before.name}, {alone[1]} only in {after.name}."
        yield Claim(line=(line,), trial_ids=())
    for pair in changed:
        lost = pair.before.record.verdict == "neutral" and pair.after.record.verdict != "neutral"
        if lost:
            line_of: Line = (pair.before.trial, f" was neutral and is {pair.after.record.verdict}.")
            yield Claim(line=line_of, trial_ids=(pair.before.trial_id,))


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


def _alone(before: Sweep, after: Sweep) -> tuple[Table, ...]:
    both = {entry.trial_id for entry in before.entries} & {entry.trial_id for entry in after.entries}
    rows: list[tuple[Line, ...]] = [
        (
            (Trial(name=entry.name, trial_id=entry.trial_id),),
            (sweep.name,),
            (Mark(text=entry.record.status),),
            _peak(entry),
        )
        for sweep in (before, after)
        for entry in sweep.entries
        if entry.trial_id not in both
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
