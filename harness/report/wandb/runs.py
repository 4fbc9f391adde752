"""The publisher process: `python -m harness.report.wandb.runs <sweep folder> --mode offline|online ...`.

One run a finished trial, its id the trial_id. Runs are always written offline first, so that no server can
lose them; online, `wandb sync` sends the files afterwards.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import wandb

from harness.records.record import Record
from harness.records.store import MARKER, Store
from harness.report.facts.flat_record import flat_config, flat_summary, history, tables
from harness.report.facts.labels import point_label
from harness.report.wandb.publisher import Marker, is_sent, marker_of, pending

_STEPS = {"parity_step": ("loss",), "timed_pair": ("variant_step_time_s", "twin_step_time_s")}
"""Step metric of each history column: wandb's own counter runs over both kinds of rows."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Publish what is pending; return 0 when nothing remains."""
    options, store = begun(arguments, __doc__)
    deadline = time.monotonic() + options.deadline_s
    for record in pending(store, online=False):
        publish_offline(store, record, project=options.project, entity=options.entity)
    return 0 if options.mode == "offline" else _send(store, deadline - time.monotonic())


def publish_offline(store: Store, record: Record, *, project: str, entity: str | None) -> None:
    """Write one trial as an offline run, and the marker that says so."""
    digest = store.digest(record.trial_id)
    run = wandb.init(
        id=record.trial_id,
        name=point_label(record.experiment),
        group=record.name,
        job_type="trial",
        tags=[record.status, record.verdict],
        project=project,
        entity=entity,
        config=flat_config(record),
        settings=_settings(store.root),
    )
    for step, columns in _STEPS.items():
        for column in columns:
            run.define_metric(column, step_metric=step)
    for row in history(record):
        run.log(row)
    for name, (headings, rows) in tables(record).items():
        run.log({name: wandb.Table(columns=list(headings), data=rows)})
    run.summary.update(flat_summary(record))
    artifact = wandb.Artifact(f"record-{record.trial_id}", type="record")
    artifact.add_file(str(store.record_path(record.trial_id)), name="record.json")
    run.log_artifact(artifact)
    run_dir = Path(run.dir).parent
    run.finish()
    marker = Marker(digest=digest, run_dir=str(run_dir.relative_to(store.root)))
    store.write_file(store.trial_dir(record.trial_id) / MARKER, json.dumps(asdict(marker)))


def begun(arguments: Sequence[str] | None, description: str | None) -> tuple[argparse.Namespace, Store]:
    """Return options and records of a process that the publisher starts."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("root", type=Path, help="folder of the sweep")
    parser.add_argument("--mode", choices=("offline", "online"), default="offline")
    parser.add_argument("--project", default="acbench")
    parser.add_argument("--entity", default=None)
    parser.add_argument("--deadline-s", type=float, default=120.0)
    options = parser.parse_args(arguments)
    # the parent ends this process at the deadline; the alarm does so if the parent is gone
    signal.setitimer(signal.ITIMER_REAL, options.deadline_s + 1)
    return options, Store(options.root.resolve())


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
