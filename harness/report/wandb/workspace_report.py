"""The W&B report of a sweep: `python -m harness.report.wandb.workspace_report <folder> --mode online ...`.

It is its conclusion as text, and panels over the runs that the publisher has sent. Numbers stand in the text;
everything else addresses flat keys of runs (`harness.report.facts.flat_record`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import wandb
import wandb_workspaces.reports.v2 as wr
from wandb_workspaces import expr

from harness.records.record import STATUSES
from harness.records.store import Store
from harness.report.content.contents import document
from harness.report.content.tables import failures, first_differences
from harness.report.facts import quantities
from harness.report.facts.document import Statement
from harness.report.facts.flat_record import summary_key
from harness.report.facts.sweep_records import SweepRecords, load
from harness.report.formats.markdown import in_markdown, markdown_table
from harness.report.trackers.tracked_run import begun
from harness.report.wandb.publisher import FOLDER, REPORT, ReportMarker, records_digest, report_marker

SPECIFICATION = "report-specification.json"
"""File below the tracker's folder that holds what W&B is sent, or will be."""

_SAVED, _PEAK, _RATIO, _FLOPS = map(
    summary_key, (quantities.SAVED, quantities.PEAK, quantities.RATIO, quantities.RECOMPUTED_FLOPS)
)
_PINNED = (
    "run:displayName",
    "config:ac.value",
    "config:mesh.value",
    "config:model.value",
    "summary:status",
    "summary:verdict",
    f"summary:{_SAVED}",
    f"summary:{_PEAK}",
    f"summary:{_FLOPS}",
    f"summary:{_RATIO}",
)
_MOST_LINES = 100
_TITLE_LENGTH = 128  # W&B takes no more


def main(arguments: Sequence[str] | None = None) -> int:
    """Keep the report's specification next to the runs; online, send it in place of the one sent before."""
    options, store = begun(arguments, __doc__)
    folder, is_online = store.root / FOLDER, options.mode == "online"
    entity = options.entity or (wandb.Api().default_entity if is_online else "")
    digest = records_digest(store)
    made = report(load(store.root), project=options.project, entity=entity or "")
    text = json.dumps(specification(made), indent=1, ensure_ascii=False)
    store.write_file(folder / SPECIFICATION, text + "\n")
    marker = _known(store, options.project, options.entity, digest)
    if is_online:
        made.id = marker.report_id or ""
        made.save()
        marker = replace(marker, sent_digest=digest, report_id=made.id, url=made.url)
    store.write_file(folder / REPORT, json.dumps(asdict(marker)))
    return 0


def report(sweep: SweepRecords, *, project: str, entity: str) -> wr.Report:
    """Return the report, which nobody has seen yet; an empty `entity` is the account's default.

    Args:
        sweep: whose runs are, or will be, in `project` under the group of its name.
    """
    return wr.Report(
        project=project,
        entity=entity,
        title=f"acbench: {sweep.name}"[:_TITLE_LENGTH],
        description=in_markdown(document(sweep).subtitle),
        width="fluid",
        blocks=[
            wr.MarkdownBlock(text=conclusion(sweep)),
            wr.PanelGrid(runsets=list(_run_sets(sweep)), panels=_panels()),
            *_troubles(sweep),
        ],
    )


def specification(made: wr.Report) -> dict[str, Any]:
    """Return what W&B stores of a report, as JSON values."""
    text: str = made._to_model().spec.model_dump_json(by_alias=True, exclude_none=True)  # noqa: SLF001 (no public name)
    value: dict[str, Any] = json.loads(text)
    return value


def conclusion(sweep: SweepRecords) -> str:
    """Return the answer as a list."""
    return _listed(document(sweep).statements)


def _known(store: Store, project: str, entity: str | None, digest: str) -> ReportMarker:
    """Return the marker for `digest`, with what an earlier one knows of the report at the same place."""
    before = report_marker(store)
    if before is None or (before.project, before.entity) != (project, entity):
        return ReportMarker(digest=digest, project=project, entity=entity)
    return replace(before, digest=digest)


def _run_sets(sweep: SweepRecords) -> Iterator[wr.Runset]:
    """Yield one set of runs a status that occurs; the table of each shows the same columns first."""
    present = {record.status for record in sweep.records}
    for status in STATUSES:
        if status in present:
            # a configuration key `sweep` would be read as W&B's own: hence the group
            yield wr.Runset(
                name=status,
                filters=[expr.Metric("Group") == sweep.name, expr.Summary("status") == status],
                pinned_columns=list(_PINNED),
            )


def _panels() -> list[Any]:
    peak, ratio, flops = (wr.SummaryMetric(name) for name in (_PEAK, _RATIO, _FLOPS))
    columns = [wr.Config("ac"), wr.Config("mesh"), wr.Config("model"), peak, flops, ratio]
    named = [wr.ParallelCoordinatesPlotColumn(metric=metric) for metric in columns]
    wide, half = {"x": 0, "w": 24}, {"w": 12, "h": 8}
    return [
        wr.ScatterPlot(
            title="Memory against time", x=ratio, y=peak, layout=wr.Layout(x=0, y=0, **half), regression=False
        ),
        wr.BarPlot(
            title="Peak bytes by variant",
            metrics=[_PEAK],
            groupby=wr.Config("ac"),
            groupby_aggfunc="median",
            layout=wr.Layout(x=12, y=0, **half),
        ),
        wr.ParallelCoordinatesPlot(
            title="Choices and costs", columns=named, layout=wr.Layout(y=8, h=8, **wide)
        ),
        wr.ParameterImportancePlot(with_respect_to=_PEAK, layout=wr.Layout(x=0, y=16, **half)),
        wr.ParameterImportancePlot(with_respect_to=_RATIO, layout=wr.Layout(x=12, y=16, **half)),
    ]


def _troubles(sweep: SweepRecords) -> Iterator[wr.MarkdownBlock]:
    differences, failed = first_differences(sweep), failures(sweep)
    if differences:
        yield wr.MarkdownBlock(text=f"## First differences\n\n{_listed(differences[:_MOST_LINES])}")
    if failed.rows:
        yield wr.MarkdownBlock(text=f"## {failed.title}\n\n{markdown_table(failed)}")


def _listed(statements: Sequence[Statement]) -> str:
    return "\n".join(f"* {in_markdown(statement.line)}" for statement in statements)


if __name__ == "__main__":
    sys.exit(main())
