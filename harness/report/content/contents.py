"""The contents of a report on a sweep, the answer first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from harness.records.record import Record
from harness.report.content.answer import answer, differing, ending
from harness.report.content.details import MOST_DETAILED, detailed, details
from harness.report.content.figures import MOST_BARS, figures
from harness.report.content.largest_at_peak import largest_at_peak
from harness.report.content.predicted_tables import beside_measured, fastest, outlooks
from harness.report.content.routers import routers
from harness.report.content.tables import (
    collectives,
    commands,
    environment,
    failures,
    first_differences,
    remarks,
    results,
    savings,
    stages,
    verdicts,
)
from harness.report.facts.document import Chapter, Document, Figure, Line, Section, Statement, Table
from harness.report.facts.number_words import and_more
from harness.report.facts.sweep_records import SweepRecords, sentence
from harness.report.facts.workloads import MOST_WORKLOADS, Workload, workloads

_MOST_DEVICES = 2


def document(sweep: SweepRecords) -> Document:
    """Return the report on `sweep`; parts that no record has numbers for are left out."""
    chosen, found = detailed(sweep), workloads(sweep)
    sections = (
        Section(key="plan", title="Plan", statements=fastest(sweep), items=_filled([outlooks(sweep)])),
        Section(
            key="trials",
            title="Trials",
            statements=(*_limits(sweep, len(found)), *remarks(sweep)),
            items=_filled([results(sweep)]),
        ),
        Section(
            key="parity",
            title="Is the mathematics unchanged?",
            statements=first_differences(sweep),
            items=_filled(
                [verdicts(sweep)] if {each.status for each in sweep.records} - {"predicted"} else []
            ),
        ),
        Section(key="peak", title="What lives at the peak", items=_filled([largest_at_peak(sweep)])),
        Section(key="endings", title="Failures", items=_filled([failures(sweep)])),
        Section(
            key="traffic",
            title="More numbers",
            items=_filled([stages(sweep), beside_measured(sweep), collectives(chosen), routers(sweep)]),
        ),
        Section(
            key="details",
            title="Each trial",
            statements=tuple(_detail_limit(sweep)),
            items=tuple(details(entry) for entry in chosen),
        ),
        Section(key="method", title="Protocol", items=_filled([environment(sweep), commands(chosen)])),
    )
    return Document(
        title=sweep.name,
        subtitle=subtitle(sweep),
        differing=differing([entry.experiment for entry in sweep.entries]),
        partial=partial(sweep),
        chapters=tuple(_chapter(number, each) for number, each in enumerate(found[:MOST_WORKLOADS], 1)),
        answer=ending(sweep),
        sections=tuple(section for section in sections if section.items),
    )


def partial(*sweeps: SweepRecords) -> str:
    """Return the sentence about trials without a record; empty where there are none."""
    incomplete = [sweep for sweep in sweeps if sweep.waiting]
    if not incomplete:
        return ""
    if all(sweep.is_abandoned for sweep in incomplete):
        return "Partial: interrupted; the same command continues."
    return "Partial: trials are still without a record."


def subtitle(sweep: SweepRecords) -> Line:
    """Return where and when the sweep ran, and whether more of it is to come."""
    environments = [record.environment for record in sweep.records]
    devices = Counter(device for record in sweep.records if (device := _device(record)) is not None)
    torches = sorted({str(each["torch"]) for each in environments if each.get("torch")})
    times = sorted(record.finished_at for record in sweep.records)
    where = ", ".join(device for device, _ in devices.most_common(_MOST_DEVICES))
    more = and_more(len(devices) - _MOST_DEVICES)
    version = f"torch {', '.join(torches)}" if torches else ""
    parts = [f"{where}{more}", version, times[-1][:10] if times else "no record yet"]
    waiting = len(sweep.waiting)
    if waiting:
        total = waiting + len(sweep.entries)
        parts.append(f"partial: {len(sweep.entries)} of {total} trials have a record")
    return (" · ".join(filter(None, parts)),)


def _device(record: Record) -> str | None:
    if record.outlook is not None:
        return f"plan for {record.outlook.hardware or 'any hardware'}"
    device = record.environment.get("device")
    return str(device) if device else None


def _chapter(number: int, workload: Workload) -> Chapter:
    """Return what is said of one workload; keys of others than the first end in its number."""
    items = (*_filled([savings(workload.sweep)]), *figures(workload.sweep))
    return Chapter(
        key=f"workload-{number}",
        title=workload.name,
        answer=answer(workload.sweep),
        items=items if number == 1 else tuple(replace(item, key=f"{item.key}-{number}") for item in items),
        trial_ids=frozenset(entry.trial_id for entry in workload.sweep.entries),
    )


def _filled(tables: Iterable[Table]) -> tuple[Table | Figure, ...]:
    return tuple(table for table in tables if table.rows)


def _limits(sweep: SweepRecords, workload_count: int) -> Iterator[Statement]:
    """Yield what the page leaves out, where it does."""
    if len(sweep.entries) > MOST_BARS:
        yield sentence(
            f"Figures with a bar a trial show the {MOST_BARS} trials with the lowest peaks of the setting "
            "with the most trials; the tables have all."
        )
    if workload_count > MOST_WORKLOADS:
        yield sentence(
            f"Answers and figures are of {MOST_WORKLOADS} of {workload_count} models and recipes, "
            "those with the most trials."
        )


def _detail_limit(sweep: SweepRecords) -> Iterator[Statement]:
    if len(sweep.entries) > MOST_DETAILED:
        yield sentence(
            f"Details, collectives and commands are of {MOST_DETAILED} of {len(sweep.entries)} trials: what "
            "went wrong, what is best, then others. The CSV file has every number and command."
        )
