"""The columns of the results table, and the sentences about a trial: one definition for every backend."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from harness.records.predicted_step import assuming
from harness.records.record import Record
from harness.records.statistics import is_distinguishable
from harness.report.facts import quantities
from harness.report.facts.document import NOTHING, Line, LinePart, Mark, Table, plain
from harness.report.facts.quantities import Quantity
from harness.report.facts.sweep_records import Entry

Legend = Mapping[tuple[str, ...], str]
"""Sentences by the columns that they explain."""

LEGEND: Legend = {
    ("saved", "peak"): (
        "saved, peak: maximum over ranks; GPU: what a GPU would need, because on a CPU the host memory that "
        "a strategy moves to is the same memory."
    ),
    ("step time vs baseline",): (
        "step time vs baseline: median ratio [95 % interval]; ≈1: cannot be told from 1, because the "
        "interval reaches 1 ± 0.01."
    ),
    ("recomputed FLOPs",): "FLOPs: of products, convolutions, attention, recurrent layers and transforms.",
    ("above bound",): (
        "above bound: percent of a step's FLOPs recomputed above what any schedule of its operators must at "
        "this peak."
    ),
    ("tokens/s", "MFU / HFU"): (
        "tokens/s (a device), MFU, HFU (of a published peak): of the sweep's baseline, divided by the ratio."
    ),
    ("collectives",): "collectives: forward+backward+optimizer.",
}

TWIN = "(its twin)"
"""What the row of a twin is called."""
PHASES = ("forward", "backward", "optimizer")
FITS = {True: "yes", False: "no", None: NOTHING}

_LIKE_ONE = Mark(
    text="≈1", about="cannot be told from the baseline's step time: the interval reaches 1 ± 0.01"
)
_AS_ON_GPU = Mark(
    text="GPU", about="what a GPU would need; on a CPU the host memory it moves to is the same memory"
)


def result_cells(entry: Entry) -> dict[str, Line]:
    """Return the cell of every column."""
    return {heading: cell(entry) for heading, cell in _CELLS.items()}


def twin_cells(entries: Sequence[Entry]) -> dict[str, Line] | None:
    """Return the cells of the twin of a single trial, which no other row shows; `None` where others do."""
    if len(entries) != 1 or entries[0].is_baseline:
        return None
    (entry,) = entries
    known = {"saved": quantities.BASELINE_SAVED, "peak": quantities.BASELINE_PEAK}
    if entry.number(quantities.BASELINE_PEAK) is None:
        return None
    cells: dict[str, Line] = dict.fromkeys(_CELLS, (NOTHING,))
    cells["status"] = (Mark(text=entry.record.status),)
    return cells | {heading: number_cell(entry, quantity) for heading, quantity in known.items()}


def filled_table(
    rows: Sequence[Mapping[str, Line]], *, key: str, title: str, about: str = "", is_folded: bool = False
) -> Table:
    """Return a table of the columns that say something; that all trials are ok says nothing."""
    names = dict.fromkeys(name for row in rows for name in row)
    idle = {name: "ok" if name == "status" else NOTHING for name in names}
    shown = [name for name in names if any(plain(row.get(name, (NOTHING,))) != idle[name] for row in rows)]
    cells = tuple(tuple(row.get(name, (NOTHING,)) for name in shown) for row in rows)
    return Table(key=key, title=title, columns=tuple(shown), rows=cells, about=about, is_folded=is_folded)


def legend(sentences: Legend, columns: Collection[str]) -> tuple[str, ...]:
    """Return the sentences that explain one of `columns`, in their order."""
    return tuple(sentence for explained, sentence in sentences.items() if set(explained) & set(columns))


def phases_of(by_phase: Mapping[str, Mapping[str, int]]) -> tuple[str, ...]:
    """Return the phases worth a number: an optimizer that communicates nothing is left out."""
    return PHASES if by_phase.get("optimizer") else PHASES[:2]


def ratio(entry: Entry) -> Line:
    """Return the median ratio of step times with its interval, marked where it cannot be told from 1."""
    line = ratio_with_interval(entry)
    return (*line, " ", _LIKE_ONE) if is_like_baseline(entry) else line


def ratio_with_interval(entry: Entry) -> Line:
    """Return the median ratio of step times with its interval, without the mark."""
    median, low, high = (
        entry.number(each) for each in (quantities.RATIO, quantities.RATIO_LOW, quantities.RATIO_HIGH)
    )
    if median is None or low is None or high is None:
        return (NOTHING,)
    if entry.record.status == "predicted":  # there was nothing to sample
        return (median,)
    return (median, " [", low, ", ", high, "]")


def is_like_baseline(entry: Entry) -> bool:
    """Return whether a step time was measured that cannot be told from the baseline's."""
    time = entry.record.time
    if time is None or time.ratio_to_baseline is None or entry.record.status == "predicted":
        return False
    return not is_distinguishable(time.ratio_to_baseline)


def on_gpu(entry: Entry, quantity: Quantity) -> Line:
    """Return a number of bytes, marked where it is what a GPU would need and not this CPU."""
    line = number_cell(entry, quantity)
    return (*line, " ", _AS_ON_GPU) if entry.is_as_on_gpu else line


def _predicted_peak(entry: Entry) -> Line:
    """Return the predicted peak, marked where the trial holds other bytes than were predicted."""
    line = number_cell(entry, quantities.PREDICTED_PEAK)
    wrong = quantities.missed(entry.record)
    return (*line, " ", unequal(entry.record, f"measured otherwise: {', '.join(wrong)}")) if wrong else line


def unequal(record: Record, about: str) -> Mark:
    """Return the mark of what was measured otherwise than predicted; an estimate is no mismatch."""
    if record.predicted is None or not record.predicted.assumes:
        return Mark(text="≠", about=about)
    return Mark(text="≈", about=f"{about}; {assuming(record.predicted.assumes)}")


def number_cell(entry: Entry, quantity: Quantity) -> Line:
    """Return a cell of one number."""
    return (entry.number(quantity) or NOTHING,)


def _number(quantity: Quantity) -> Callable[[Entry], Line]:
    return lambda entry: number_cell(entry, quantity)


def _utilisation(entry: Entry) -> Line:
    # a peak that each trial measured for itself drifts with the machine: it must not rank rows
    time = entry.record.time
    if time is None or (time.peak_flops_per_s_source or "").startswith("measured"):
        return (NOTHING,)
    return (entry.speed(quantities.MFU) or NOTHING, " / ", entry.speed(quantities.HFU) or NOTHING)


def _collectives(entry: Entry) -> Line:
    if entry.record.work is None:
        return (NOTHING,)
    by_phase = entry.record.work.collectives
    line: list[LinePart] = []
    for name in dict.fromkeys(name for phase in PHASES for name in by_phase.get(phase, {})):
        line += [", " if line else "", f"{name} ", *_counts(entry, name, phases_of(by_phase))]
    return tuple(line[1:]) or (NOTHING,)


def _counts(entry: Entry, name: str, phases: Iterable[str]) -> Iterator[LinePart]:
    """Yield how often a collective ran in each phase, as in `2+1`."""
    for index, phase in enumerate(phases):
        if index:
            yield "+"
        yield entry.number(quantities.collective_count(phase, name)) or "0"


_CELLS: dict[str, Callable[[Entry], Line]] = {
    "status": lambda entry: (Mark(text=entry.record.status),),
    "verdict": lambda entry: (entry.mark,),
    "saved": _number(quantities.SAVED),
    "peak": lambda entry: on_gpu(entry, quantities.PEAK),
    "step time vs baseline": ratio,
    "recomputed FLOPs": _number(quantities.RECOMPUTED_FLOPS),
    "above bound": _number(quantities.ABOVE_BOUND),
    "predicted peak": _predicted_peak,
    "tokens/s": lambda entry: (entry.speed(quantities.TOKENS_PER_S) or NOTHING,),
    "MFU / HFU": _utilisation,
    "collectives": _collectives,
}
