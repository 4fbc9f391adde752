"""The tables of a report: results, verdicts by mesh, failures, collectives, environment, commands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from harness.report.content.columns import (
    LEGEND,
    PHASES,
    TWIN,
    filled_table,
    legend,
    number_cell,
    on_gpu,
    ratio,
    result_cells,
    twin_cells,
)
from harness.report.content.distances import cheaper
from harness.report.facts import quantities
from harness.report.facts.commands import command
from harness.report.facts.document import NOTHING, CodeText, Line, LinePart, Mark, Statement, Table
from harness.report.facts.number_words import and_more, printable, shortened
from harness.report.facts.pareto import ParetoFront
from harness.report.facts.pipeline_notes import forwards_of_blocks
from harness.report.facts.sweep_records import Entry, SweepRecords, grouped, sentence

_PROTOCOL = ("protocol", "data")
_ENVIRONMENT = (
    "device",
    "cpus",
    "omp_num_threads",
    "host",
    "torch",
    "cuda",
    "driver",
    "python",
    "backend",
    "commit",
    "packages",
)
_MOST_VALUES = 6
_GPU_WORDS = "GPU: what a GPU would save; on a CPU host memory is the same memory, and nothing is saved."
_MOST_OF_A_MESSAGE = 2_000  # characters; the record has all

_TRAFFIC = "Started by a rank in one step, and their payload; maximum over ranks."
_REPEATED = " repeated: those of them that recomputation starts once more."


def results(sweep: SweepRecords) -> Table:
    """Return every trial with its numbers, the columns that a terminal shows."""
    found: list[dict[str, Line]] = [
        {"trial": (entry.trial,)} | result_cells(entry) for entry in sweep.entries
    ]
    twin = twin_cells(sweep.entries)
    found += [] if twin is None else [{"trial": (TWIN,)} | twin]
    table = filled_table(found, key="results", title="All trials")
    return replace(table, about=" ".join(legend(LEGEND, table.columns)))


def savings(sweep: SweepRecords) -> Table:
    """Return what each strategy saves at which step time, by mesh, what saves most first."""
    found = [
        (entry, front)
        for setting, front in sweep.fronts.items()
        for entry in _tried(sweep.by_setting[setting])
    ]
    rows = [
        {
            "variant": (entry.choice,),
            "mesh": (entry.mesh,),
            "saves": on_gpu(entry, quantities.PEAK_SAVING),
            "step time vs baseline": ratio(entry),
            "standing": _standing(entry, front),
        }
        for entry, front in found
    ]
    shown = [name for name in (rows[0] if rows else ()) if name != "mesh" or len(sweep.by_setting) > 1]
    return Table(
        key="savings",
        title="What each saves",
        columns=tuple(shown),
        rows=tuple(tuple(row[name] for name in shown) for row in rows),
        about=(
            "saves: of the baseline's peak memory. On the front: nothing else needs as little memory in as "
            f"little time. {_GPU_WORDS if any(entry.is_as_on_gpu for entry, _ in found) else ''}"
        ).rstrip(),
    )


def _tried(entries: Sequence[Entry]) -> list[Entry]:
    """Return the strategies of a setting whose peak can be compared, least memory first."""
    tried = [entry for entry in entries if not entry.is_baseline]
    known = [
        (share, entry) for entry in tried if (share := quantities.PEAK_SHARE.of(entry.record)) is not None
    ]
    return [entry for _, entry in sorted(known, key=lambda each: each[0])]


def _standing(entry: Entry, front: ParetoFront) -> Line:
    """Return whether a trial is worth choosing, or why that cannot be said."""
    if entry.record.verdict in {"differs", "inert"}:
        return (entry.mark,)
    if entry.record.time is None or entry.record.time.ratio_to_baseline is None:
        return ("not timed",)
    if entry.is_as_on_gpu:
        return ("not on this CPU",)
    by = front.dominated.get(entry.trial_id)
    return ("on the front",) if by is None else (f"behind {by.entry.choice}",)


def verdicts(sweep: SweepRecords) -> Table:
    """Return verdicts by variant and mesh; what a verdict rests on is on its mark."""
    places = list(dict.fromkeys(sweep.place(entry) for entry in sweep.entries))
    variants: dict[str, dict[str, list[LinePart]]] = {}
    for entry in sweep.entries:
        found = variants.setdefault(entry.variant, {}).setdefault(sweep.place(entry), [])
        status = entry.record.status
        shown = entry.mark if status == "ok" else Mark(text=status, about=entry.mark.about)
        found += [*([" "] if found else []), shown]
    rows = [
        ((CodeText(text=variant),), *(tuple(by_place.get(place, [NOTHING])) for place in places))
        for variant, by_place in variants.items()
    ]
    return Table(
        key="verdicts",
        title="Verdicts",
        columns=("variant", *places),
        rows=tuple(rows),
        about=(
            "neutral: outputs, loss, gradients, buffers, random state and parameters equal those of "
            f"{sweep.baselines[1]}, bit for bit. "
            "neutral (tolerance): within what the trial's note says; a tensor below the share of the largest "
            "of its part that stands there is measured by that share. Where a trial has no verdict, how it "
            "ended."
        ),
    )


def first_differences(sweep: SweepRecords) -> tuple[Statement, ...]:
    """Return the sentence about every first difference, and about every trial that did nothing."""
    return tuple(
        sentence(entry.trial, f": {text}.", of=[entry])
        for entry in sweep.entries
        for text in (entry.notes if entry.record.verdict == "inert" else entry.differences)
    )


def remarks(sweep: SweepRecords) -> tuple[Statement, ...]:
    """Return what became of plans, and who is beaten; of trials that do nothing it is said with that."""
    remarked = [entry for entry in sweep.entries if entry.record.verdict != "inert"]
    groups = grouped((remark, entry) for entry in remarked for remark in entry.plan_notes)
    return (
        *(
            sentence(entries[0].trial, f"{and_more(len(entries) - 1)}: {remark}.", of=entries)
            for remark, entries in groups.items()
        ),
        *(
            sentence(entry.trial, *parts, ".", of=[entry, other])
            for entry, other, parts in cheaper(sweep.entries)
        ),
    )


def failures(sweep: SweepRecords) -> Table:
    """Return what did not end well, with rank and phase."""
    failed = [(entry, entry.record.error) for entry in sweep.entries if entry.record.error is not None]
    rows: list[tuple[Line, ...]] = [
        (
            (entry.trial,),
            (Mark(text=entry.record.status),),
            (CodeText(text=error.kind),),
            number_cell(entry, quantities.ERROR_RANK),
            (error.phase or NOTHING,),
            (shortened(" ".join(printable(error.message).split()), _MOST_OF_A_MESSAGE),),
            (CodeText(text=error.log) if error.log else NOTHING,),
        )
        for entry, error in failed
    ]
    return Table(
        key="failures",
        title="What did not end well",
        columns=("trial", "status", "kind", "rank", "phase", "message", "log"),
        rows=tuple(rows),
    )


def collectives(entries: Sequence[Entry]) -> Table:
    """Return number and payload of collectives by phase, and how many of them recomputation repeats."""
    headings = [f"{phase}{suffix}" for phase in PHASES for suffix in ("", " bytes")]
    repeats = any(
        entry.record.work is not None and entry.record.work.collectives_repeated for entry in entries
    )
    return Table(
        key="collectives",
        title="Collectives",
        columns=("trial", "collective", *headings, *(["repeated"] if repeats else [])),
        rows=tuple(
            (
                (entry.trial,),
                (name,),
                *(cell for phase in PHASES for cell in _traffic(entry, phase, name)),
                *([number_cell(entry, quantities.collectives_repeated(name))] if repeats else []),
            )
            for entry in entries
            for name in _collective_names(entry)
        ),
        about=_TRAFFIC + (_REPEATED if repeats else ""),
        is_folded=True,
    )


def stages(sweep: SweepRecords) -> Table:
    """Return the ranks of each pipeline: stages, what is in flight, bytes, and how often blocks run."""
    return Table(
        key="stages",
        title="Ranks of pipelines",
        columns=(
            "trial",
            "rank",
            "stages",
            "in flight",
            "of weights",
            "a forward leaves",
            "peak",
            "forwards",
        ),
        rows=tuple(
            (
                (entry.trial,),
                (str(each.rank),),
                (" ".join(map(str, each.stages)),),
                number_cell(entry, quantities.in_flight(each.rank)),
                number_cell(entry, quantities.in_flight_weights(each.rank)),
                number_cell(entry, quantities.stage_bytes(each.rank)),
                number_cell(entry, quantities.rank_peak(each.rank)),
                (forwards_of_blocks(each, entry.record.experiment.get("microbatches", 1)) or NOTHING,),
            )
            for entry in sweep.entries
            if entry.record.memory is not None
            for each in entry.record.memory.pipeline or ()
        ),
        about=(
            "in flight: the most forwards whose input has no gradient yet; of weights: whose weights have "
            "none of them. forwards: of a block for a micro-batch, asked for by forward + by a backward or "
            "its part for the input + by its part for weights. The first stage has no gradient of an input "
            "to give, and takes its whole backward with the weights."
        ),
    )


def environment(sweep: SweepRecords) -> Table:
    """Return on what and how it was measured: every value that occurs."""
    rows: list[tuple[Line, ...]] = []
    for key in _ENVIRONMENT:
        rows += _occurring(key, [entry.record.environment.get(key) for entry in sweep.entries])
    for group in _PROTOCOL:
        rows += _occurring(group, [entry.record.experiment.get(group) for entry in sweep.entries])
    experiments = [entry.experiment for entry in sweep.entries]
    values = [item for experiment in experiments for item in experiment.items()]
    for key in dict.fromkeys(key for key, value in values if not isinstance(value, Mapping)):
        rows += _occurring(key, [experiment.get(key) for experiment in experiments])
    return Table(
        key="environment", title="Protocol and environment", columns=("what", "value"), rows=tuple(rows)
    )


def commands(entries: Sequence[Entry]) -> Table:
    """Return the command that repeats each trial."""
    rows = [
        ((entry.trial,), (CodeText(text=line) if line is not None else "was refused before it was complete",))
        for entry in entries
        for line in [command(entry.record.experiment)]
    ]
    return Table(
        key="commands",
        title="How to repeat a trial",
        columns=("trial", "command"),
        rows=tuple(rows),
        about="Add name=<sweep> to keep results apart.",
        is_folded=True,
    )


def _collective_names(entry: Entry) -> list[str]:
    work = entry.record.work
    return (
        [] if work is None else list(dict.fromkeys(name for by in work.collectives.values() for name in by))
    )


def _traffic(entry: Entry, phase: str, name: str) -> tuple[Line, Line]:
    count, payload = quantities.collective_count(phase, name), quantities.collective_bytes(phase, name)
    return number_cell(entry, count), number_cell(entry, payload)


def _occurring(key: str, values: Sequence[Any]) -> Iterator[tuple[Line, ...]]:
    """Yield one row a value, the most frequent first; nothing where no trial has one."""
    counts = Counter(_in_words(value) for value in values if value is not None)
    for word, count in counts.most_common(_MOST_VALUES):
        of = "" if len(counts) == 1 else f" ({count} of {len(values)})"
        yield (key,), (f"{word}{of}",)
    if len(counts) > _MOST_VALUES:
        yield (key,), (f"and {len(counts) - _MOST_VALUES} more",)


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_in_words(item)}" for key, item in value.items() if item is not None)
    return str(value)
