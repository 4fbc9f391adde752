"""The tables of predictions: what was predicted next to what was measured, and what a plan says of points."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from harness.records.merge_ranks import Work
from harness.records.record import Record
from harness.report.content.columns import FITS, filled_table, number_cell, on_gpu, unequal
from harness.report.facts import quantities
from harness.report.facts.document import NOTHING, Line, LinePart, Mark, Statement, Table
from harness.report.facts.number_words import NumberUnit, and_more, in_words
from harness.report.facts.quantities import Quantity
from harness.report.facts.sweep_records import Entry, SweepRecords, grouped, sentence

_DIFFERS = "not what was predicted"
_Counts = Mapping[str, Mapping[str, int]]
_MOST_NAMED = 4
_LEAST_SHOWN = 1e-5


def beside_measured(sweep: SweepRecords) -> Table:
    """Return what was predicted of each trial next to what it measured, the worst first."""
    found = sorted(
        (entry for entry in sweep.entries if quantities.PREDICTED_PEAK.of(entry.record) is not None),
        key=lambda entry: (-_exact_error(entry.record), -_time_error(entry.record), entry.name),
    )
    return filled_table(
        [_beside(entry) for entry in found],
        key="predictions",
        title="Predicted and measured",
        about=(
            "predicted / measured, the worst first. largest error: of bytes, FLOPs and collectives, "
            "which are predicted for rank 0; time has an error of its own. ≠: not equal; "
            "≈: an estimate, which assumes what the trial's note says."
        ),
        is_folded=True,
    )


def _beside(entry: Entry) -> dict[str, Line]:
    """Return the cells of a trial: each number predicted and measured."""
    return {
        "trial": (entry.trial,),
        "largest error": (_percent(_exact_error(entry.record)),),
        **{name: _pair(entry, pair) for name, pair in quantities.PREDICTED.items()},
        "collectives": (_collectives(entry.record),),
        "step time": _pair(entry, quantities.PREDICTED_TIME),
    }


def outlooks(sweep: SweepRecords) -> Table:
    """Return what a plan says of each point: what fits, the front of memory and time, what is done."""
    rows: list[dict[str, Line]] = [
        {
            "point": (entry.trial,),
            "state": (outlook.state,),
            "hardware": (outlook.hardware or NOTHING,),
            **_solved(entry),
            "needs": on_gpu(entry, quantities.NEEDED),
            "has": number_cell(entry, quantities.USABLE),
            "fits": (Mark(text=FITS[outlook.fits]),),
            "step time": number_cell(entry, quantities.STEP_TIME),
            "tokens/s": number_cell(entry, quantities.TOKENS_PER_S),
            "job's tokens/s": number_cell(entry, quantities.JOB_TOKENS_PER_S),
            "front": ("*" if entry.trial_id in sweep.on_front else NOTHING,),
        }
        for entry in sweep.entries
        if (outlook := entry.record.outlook) is not None
    ]
    return filled_table(
        rows,
        key="outlooks",
        title="What fits",
        about=(
            "Nothing has run. needs, has: bytes of one rank. front: nothing beside it needs less memory and "
            "less time. step time: a roofline of operators, collectives and host copies. tokens/s: of a "
            "device; job's tokens/s: of all devices together."
        ),
    )


def fastest(sweep: SweepRecords) -> tuple[Statement, ...]:
    """Return, of each setting of a plan, the point with the most tokens a second among those that fit."""
    fitting = [
        entry
        for entry in sweep.entries
        if entry.record.outlook is not None and entry.record.outlook.fits and _speed(entry) is not None
    ]
    groups = grouped((entry.setting, entry) for entry in fitting)
    return tuple(_fastest(max(group, key=lambda entry: _speed(entry) or 0)) for group in groups.values())


def _fastest(entry: Entry) -> Statement:
    assert entry.record.outlook is not None
    step = number_cell(entry, quantities.STEP_TIME)
    where = f"Fastest that fits {entry.record.outlook.hardware}: "
    return sentence(where, entry.trial, ", ", *step, " a step.", of=[entry])


def _speed(entry: Entry) -> float | None:
    """Return steps a second, times what a step trains: that of a solved point differs."""
    step_s, samples = quantities.STEP_TIME.of(entry.record), entry.record.experiment.get("batch_size")
    return samples / step_s if step_s and isinstance(samples, int) else None


def _solved(entry: Entry) -> dict[str, Line]:
    solved = None if entry.record.outlook is None else entry.record.outlook.solved
    if solved is None:
        return {}
    value = "none" if solved.value is None else f"{solved.value:,}"
    return {f"largest {solved.field}": (f"{value}{', its own limit' if solved.is_limit else ''}",)}


def _pair(entry: Entry, pair: tuple[Quantity, Quantity]) -> Line:
    """Return `predicted / measured`, marked where the two differ; a time with its error instead."""
    predicted, measured = (entry.number(quantity) for quantity in pair)
    if predicted is None or measured is None:
        return (NOTHING,)
    line: list[LinePart] = [predicted, " / ", measured]
    if pair is quantities.PREDICTED_TIME:
        line.append(f" ({predicted.value / measured.value - 1:+.0%})" if measured.value else "")
    elif predicted.value != measured.value:
        line += [" ", unequal(entry.record, _DIFFERS)]
    return tuple(line)


def _exact_error(record: Record) -> float:
    pairs = ((one.of(record), other.of(record)) for one, other in quantities.PREDICTED.values())
    known = [(one, other) for one, other in pairs if one is not None and other is not None]
    traffic = [(one, other) for mine, its in _traffic(record) for _, one, other in _differing(mine, its)]
    return max((abs(one - other) / max(abs(other), 1) for one, other in (*known, *traffic)), default=0.0)


def _percent(error: float) -> str:
    """Return an error in words; one that rounds to nothing is still one."""
    return f"{error:.3%}" if error >= _LEAST_SHOWN else "below 0.001%" if error else "none"


def _time_error(record: Record) -> float:
    predicted, measured = (quantity.of(record) for quantity in quantities.PREDICTED_TIME)
    return abs(predicted / measured - 1) if predicted is not None and measured else 0.0


def _traffic(record: Record) -> Iterator[tuple[_Counts, _Counts]]:
    """Yield numbers of collectives, then their bytes, each as predicted and as measured."""
    work: Work | None = record.work
    if record.predicted is not None and work is not None:
        yield record.predicted.collectives, work.collectives
        yield record.predicted.collective_bytes, work.collective_bytes


def _differing(one: _Counts, other: _Counts) -> Iterator[tuple[str, int, int]]:
    """Yield `forward all_gather` and both numbers, where they differ."""
    for phase in dict.fromkeys((*one, *other)):
        mine, its = one.get(phase, {}), other.get(phase, {})
        for name in dict.fromkeys((*mine, *its)):
            if mine.get(name, 0) != its.get(name, 0):
                yield f"{phase} {name}", mine.get(name, 0), its.get(name, 0)


def _collectives(record: Record) -> str:
    """Return what differs of collectives and their bytes; how many there are where nothing does."""
    found = list(_traffic(record))
    units = (NumberUnit.COUNT, NumberUnit.BYTES)
    wrong = [
        f"{name} {in_words(mine, unit)} / {in_words(its, unit)}"
        for unit, (one, other) in zip(units, found, strict=False)
        for name, mine, its in _differing(one, other)
    ]
    if wrong:
        named = f"{', '.join(wrong[:_MOST_NAMED])}{and_more(len(wrong) - _MOST_NAMED)}"
        return f"{unequal(record, _DIFFERS).text} {named}"
    count = sum(number for by_name in found[0][1].values() for number in by_name.values()) if found else 0
    return f"all {count}, with their bytes" if count else NOTHING
