"""The publisher of `tracker=trackio`: `python -m harness.report.trackers.trackio_runs <sweep folder> ...`.

Runs stay in `outputs/<name>/trackio`; `TRACKIO_DIR=outputs/<name>/trackio trackio show` opens them, and
`trackio sync` sends them.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trackio

from harness.report.trackers.tracked_run import TrackedRun, published_by


def writer(folder: Path, project: str) -> Callable[[TrackedRun], Path]:
    """Return what keeps a run in `folder`, `TRACKIO_DIR`, in place of an earlier one of the same trial."""

    def write(run: TrackedRun) -> Path:
        name = f"{run.trial_id} {run.name}"
        for earlier in _runs(project):
            if earlier.name.partition(" ")[0] == run.trial_id:
                earlier.delete()
        status, verdict = run.tags
        trackio.init(
            project=project,
            name=name,
            group=run.group,
            config={**run.config, "status": status, "verdict": verdict},
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        rows: defaultdict[int, dict[str, Any]] = defaultdict(dict)
        for column, value, step in run.stepped():
            rows[step][column] = value
        for step, row in sorted(rows.items()):
            trackio.log(row, step=step)
        columns = {
            title: trackio.Table(columns=list(headings), data=data)
            for title, (headings, data) in run.tables.items()
        }
        trackio.log({**run.summary, **columns})
        trackio.finish()
        return folder

    return write


def _runs(project: str) -> list[Any]:
    try:
        return list(trackio.Api().runs(project))
    except ValueError:  # there is no such project yet
        return []


if __name__ == "__main__":
    sys.exit(published_by("trackio", writer))
