"""A finished trial as trackers show it: one run, made of its record alone, that a writer keeps."""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.records.files import make_folder
from harness.records.record import Record
from harness.records.store import Store
from harness.report.facts.flat_record import flat_config, flat_summary, history, tables
from harness.report.facts.labels import point_label
from harness.report.wandb.publisher import Marker, marker_file, pending

STEPS = {"parity_step": ("loss",), "timed_pair": ("variant_step_time_s", "twin_step_time_s")}
"""Step of each column of the history."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """One run.

    Fields:
        trial_id: id of the trial, and of the run where the tracker lets it be chosen.
        config: resolved experiment and environment, flat.
        summary: numbers and words of the record, flat.
        history: rows with a step of `STEPS` and its columns.
        tables: columns and rows by name.
    """

    trial_id: str
    name: str
    group: str
    tags: tuple[str, str]
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    history: Sequence[Mapping[str, float]]
    tables: Mapping[str, tuple[Sequence[str], list[list[Any]]]]
    record_file: Path

    def stepped(self) -> list[tuple[str, float, int]]:
        """Return the numbers of the history, each with its name and its step."""
        return [
            (column, row[column], int(row[step]))
            for row in self.history
            for step, columns in STEPS.items()
            if step in row
            for column in columns
            if column in row
        ]


def tracked_run(store: Store, record: Record) -> TrackedRun:
    """Return the run of a record."""
    return TrackedRun(
        trial_id=record.trial_id,
        name=point_label(record.experiment),
        group=record.name,
        tags=(record.status, record.verdict),
        config=flat_config(record),
        summary=flat_summary(record),
        history=history(record),
        tables=tables(record),
        record_file=store.record_path(record.trial_id),
    )


def publish_run(store: Store, record: Record, tracker: str, write: Callable[[TrackedRun], Path]) -> None:
    """Let a writer keep the run of a record, then leave the marker that says so.

    Args:
        write: keeps a run and returns the folder of its files.
    """
    digest = store.digest(record.trial_id)
    folder = write(tracked_run(store, record))
    marker = Marker(digest=digest, run_dir=str(folder.relative_to(store.root)))
    store.write_file(store.trial_dir(record.trial_id) / marker_file(tracker), json.dumps(asdict(marker)))


def published_by(tracker: str, writer: Callable[[Path, str], Callable[[TrackedRun], Path]]) -> int:
    """Publish what a tracker does not have, as the program of its publisher; return its exit status.

    Args:
        writer: makes the writer of runs from the tracker's folder and the name of the project.
    """
    options, store = begun(None, None)
    folder = make_folder(store.root / tracker, within=store.root)
    write = writer(folder, options.project)
    for record in pending(store, tracker):
        publish_run(store, record, tracker, write)
    return 0


def begun(arguments: Sequence[str] | None, description: str | None) -> tuple[argparse.Namespace, Store]:
    """Return options and records of a process that the publisher starts."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("root", type=Path, help="folder of the sweep")
    parser.add_argument("--mode", default="offline")
    parser.add_argument("--project", default="acbench")
    parser.add_argument("--entity", default=None)
    parser.add_argument("--deadline-s", type=float, default=120.0)
    options = parser.parse_args(arguments)
    # the parent ends this process at the deadline; the alarm does so if the parent is gone
    signal.setitimer(signal.ITIMER_REAL, options.deadline_s + 1)
    return options, Store(options.root.resolve())
