"""The publisher process: `python -m harness.report.wandb.runs <sweep folder> --mode offline|online ...`.

One run a finished trial, its id the trial_id. Runs are always written offline first, so that no server can
lose them; online, `wandb sync` sends the files afterwards.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import wandb

from harness.records.store import Store
from harness.report.trackers.tracked_run import STEPS, TrackedRun, begun, publish_run
from harness.report.wandb.publisher import is_sent, marker_of, pending


def main(arguments: Sequence[str] | None = None) -> int:
    """Publish what is pending; return 0 when nothing remains."""
    options, store = begun(arguments, __doc__)
    deadline = time.monotonic() + options.deadline_s
    write = writer(store.root, options.project, options.entity)
    for record in pending(store):
        publish_run(store, record, "wandb", write)
    return 0 if options.mode == "offline" else _send(store, deadline - time.monotonic())


def writer(root: Path, project: str, entity: str | None) -> Callable[[TrackedRun], Path]:
    """Return what keeps a run offline in the sweep's folder `root`."""

    def write(tracked: TrackedRun) -> Path:
        run = wandb.init(
            id=tracked.trial_id,
            name=tracked.name,
            group=tracked.group,
            job_type="trial",
            tags=list(tracked.tags),
            project=project,
            entity=entity,
            config=dict(tracked.config),
            settings=_settings(root),
        )
        # wandb's own counter runs over both kinds of rows
        for step, columns in STEPS.items():
            for column in columns:
                run.define_metric(column, step_metric=step)
        for row in tracked.history:
            run.log(dict(row))
        for name, (headings, rows) in tracked.tables.items():
            run.log({name: wandb.Table(columns=list(headings), data=rows)})
        run.summary.update(dict(tracked.summary))
        artifact = wandb.Artifact(f"record-{tracked.trial_id}", type="record")
        artifact.add_file(str(tracked.record_file), name="record.json")
        run.log_artifact(artifact)
        run_dir = Path(run.dir).parent
        run.finish()
        return run_dir

    return write


def _settings(root: Path) -> wandb.Settings:
    """Return settings that keep a run on disk and measure nothing themselves."""
    return wandb.Settings(
        mode="offline",
        root_dir=str(root),
        use_dot_wandb=False,
        console="off",
        silent=True,
        disable_code=True,
        disable_git=True,
        save_code=False,
        x_disable_stats=True,
        x_disable_machine_info=True,  # the record has what matters of it
    )


def _send(store: Store, timeout_s: float) -> int:
    """Send the offline runs that no server has; wandb marks each one that arrived."""
    markers = [marker_of(store, record.trial_id) for record in store.scan().records]
    folders = [
        str(store.root / marker.run_dir) for marker in markers if marker and not is_sent(store, marker)
    ]
    if not folders:
        return 0
    command = [sys.executable, "-P", "-m", "wandb", "sync", *folders]
    return subprocess.run(command, check=False, timeout=timeout_s).returncode  # noqa: S603 (wandb's own client)


if __name__ == "__main__":
    sys.exit(main())
