"""Sends finished records to a tracker from a process of its own, within a deadline.

Nothing a tracker does can hurt a sweep: ranks never import it, and neither does this module.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from harness.errors import ConfigError, require_at_least, require_one_of
from harness.process_tree import MARK, end_marked
from harness.records.fields import decode_file
from harness.records.files import make_private_folder, new_file
from harness.records.record import Record
from harness.records.store import MARKER, RECORD, Store
from harness.report.wandb.server_answers import last_answer

TRACKERS = ("offline", "online", "none", "trackio", "mlflow")
FOLDER = "wandb"
"""Folder of the tracker's files, below the sweep's folder."""

LOG = "publisher.log"
REPORT = "report.json"
"""File below `FOLDER` that names the records of the latest report, and its id in W&B."""

_MOST_BYTES = 2**20  # of a marker
_WANDB = "wandb"
_SHOWN = {_WANDB: "W&B", "trackio": "trackio", "mlflow": "MLflow"}
_PACKAGES = {_WANDB: ("wandb", "wandb_workspaces"), "trackio": ("trackio",), "mlflow": ("mlflow",)}
_KEPT_SETTINGS = (
    "WANDB_API_KEY",
    "WANDB_BASE_URL",
    "WANDB_ENTITY",
    "WANDB_IDENTITY_TOKEN_FILE",
    "WANDB_CONFIG_DIR",
    "WANDB_EXTRA_HTTP_HEADERS",
)
"""Credentials and address. What else a user's shell sets (run id, mode, sweep) belongs to another run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tracker:
    """A place where finished trials are shown.

    Fields:
        name: `offline` writes W&B's files into the sweep's folder, `online` sends them too, `none` does
            nothing; `trackio` and `mlflow` write files of theirs, or tell MLflow's server of the environment.
        project: project of W&B or trackio, experiment of MLflow.
        entity: entity of W&B; `None` is the account's default.
        deadline_s: longest time in seconds that publishing may take; what is missing is sent next time.
    """

    name: str = "offline"
    project: str = "acbench"
    entity: str | None = None
    deadline_s: float = 120.0

    def __post_init__(self) -> None:
        """Refuse options that W&B would not take, and a package that is missing."""
        require_one_of("tracker.name", self.name, TRACKERS)
        require_at_least("tracker.deadline_s", self.deadline_s, 1)
        if not self.project.strip():
            raise ConfigError("tracker.project", f"must name a project, got {self.project!r}")
        if self.entity is not None and self.kind != _WANDB:
            raise ConfigError("tracker.entity", f"is an account of W&B; leave it out for {self.name}")
        if self.name not in ("offline", "none") and _missing(self.kind):
            raise ConfigError("tracker", _missing(self.kind))

    @property
    def kind(self) -> str:
        """Name of the tracker, of its folder, its extra and its publisher."""
        return self.name if self.name in _SHOWN else _WANDB


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """The result of publishing; as a string, one line for people.

    Fields:
        published: records of this call that the tracker has now.
        folder: where the offline files are.
        problem: why records remain, or why the report is not current; `None` when all is well.
        report_url: where the report is; `None` where none was sent.
    """

    published: int
    remaining: int
    folder: Path
    problem: str | None
    report_url: str | None = None
    tracker: str = _SHOWN[_WANDB]

    def __str__(self) -> str:
        """Return what was published, and what was not and why."""
        report = "" if self.report_url is None else f", report {self.report_url}"
        done = f"{self.tracker}: {self.published} published, files in {self.folder}{report}"
        if self.problem is None:
            return done
        log = f"; see {self.folder / LOG}" if (self.folder / LOG).is_file() else ""
        what = f"{self.remaining} not published" if self.remaining else "the report is not up to date"
        return f"{done}; {what}, the same command tries again: {self.problem}{log}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Marker:
    """The mark next to a published record.

    Fields:
        digest: digest of the record file that was published.
        run_dir: folder of its offline files, relative to the sweep's folder.
    """

    digest: str
    run_dir: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportMarker:
    """The contents of the file `REPORT`.

    Fields:
        digest: digest of the records that the specification was written from.
        project, entity: where it is to be, as they were asked for.
        sent_digest: digest of the records that the report in W&B is about; `None` until it was sent.
        report_id, url: id and address that W&B gave the report.
    """

    digest: str
    project: str
    entity: str | None
    sent_digest: str | None = None
    report_id: str | None = None
    url: str | None = None


def publish(store: Store, tracker: Tracker, *, with_report: bool = False) -> Published | None:
    """Publish the finished records of a sweep that are not published yet, online with a report on them.

    A process of its own does it and is ended, with everything it started, when the deadline passes. Trouble
    of any kind ends in `Published.problem`; the next call continues.

    Args:
        with_report: write the report's specification offline, too.

    Returns:
        What was done; `None` for `tracker=none`.
    """
    if tracker.name == "none":
        return None
    kind, online = tracker.kind, tracker.name == "online"
    waiting, with_report = pending(store, kind, online=online), kind == _WANDB and (with_report or online)
    writer = "wandb.runs" if kind == _WANDB else f"trackers.{kind}_runs"

    def is_report_due() -> bool:
        return with_report and not _has_report(store, tracker)

    problem = _missing(kind) or None
    if (waiting or is_report_due()) and problem is None:
        # in this order: a report needs its runs
        modules = [writer] * bool(waiting) + ["wandb.workspace_report"] * with_report
        problem = _run_publisher(store.root, tracker, modules)
    remaining = len(pending(store, kind, online=online)) if waiting else 0
    is_done = not remaining and not is_report_due()
    marker = report_marker(store) if online else None
    return Published(
        published=len(waiting) - remaining,
        remaining=remaining,
        folder=store.root / kind,
        problem=None if is_done else problem or "the publisher ended without a reason",
        report_url=None if marker is None else marker.url,
        tracker=_SHOWN[kind],
    )


def _missing(kind: str) -> str:
    """Return the sentence about a package that is not installed; empty where all are."""
    missing = next((name for name in _PACKAGES[kind] if importlib.util.find_spec(name) is None), None)
    return f"needs the package {missing!r}; pip install 'acbench[{kind}]', or tracker=none" if missing else ""


def report_marker(store: Store) -> ReportMarker | None:
    """Return what is known of the sweep's report; `None` where none was written or the file is torn."""
    return decode_file(ReportMarker, store.root / FOLDER / REPORT, _MOST_BYTES)


def records_digest(store: Store) -> str:
    """Return 12 hexadecimal digits that change whenever a record comes, goes or changes."""
    names = sorted(path.parent.name for path in store.root.glob(f"*/{RECORD}") if path.is_file())
    text = " ".join(f"{name}:{store.digest(name)}" for name in names)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _has_report(store: Store, tracker: Tracker) -> bool:
    """Return whether the report on the current records is where `tracker` wants it."""
    marker = report_marker(store)
    if marker is None or (marker.project, marker.entity) != (tracker.project, tracker.entity):
        return False
    digest = marker.sent_digest if tracker.name == "online" else marker.digest
    return digest == records_digest(store)


def pending(store: Store, kind: str = _WANDB, *, online: bool = False) -> list[Record]:
    """Return the records that the tracker does not have: no offline files or, online, files not yet sent."""
    return [
        record
        for record in store.scan().records
        if (marker := marker_of(store, record.trial_id, kind)) is None
        or (online and not is_sent(store, marker))
    ]


def marker_file(kind: str) -> str:
    """Return the name of the marker that a tracker leaves next to a published record."""
    return MARKER if kind == _WANDB else f"published.{kind}.json"


def marker_of(store: Store, trial_id: str, kind: str = _WANDB) -> Marker | None:
    """Return the marker of a trial whose current record has files of a tracker."""
    marker = decode_file(Marker, store.trial_dir(trial_id) / marker_file(kind), _MOST_BYTES)
    if marker is None:  # publish again
        return None
    is_current = marker.digest == store.digest(trial_id) and (store.root / marker.run_dir).is_dir()
    return marker if is_current else None


def is_sent(store: Store, marker: Marker) -> bool:
    """Return whether `wandb sync` has left its mark in a run's folder."""
    return any((store.root / marker.run_dir).glob("*.wandb.synced"))


def _run_publisher(root: Path, tracker: Tracker, modules: Sequence[str]) -> str | None:
    """Run programs one after the other, in a process each, and return what went wrong first."""
    root = root.resolve()
    folder, end = root / tracker.kind, time.monotonic() + tracker.deadline_s
    began_s = time.time()
    code = 0
    try:
        make_private_folder(folder, within=root)
        with (
            tempfile.TemporaryDirectory(prefix="acbench-", ignore_cleanup_errors=True) as place,
            new_file(folder / LOG, within=root) as log,
        ):
            try:
                for module in modules:
                    if code == 0:
                        left_s = end - time.monotonic()
                        code = _ran(module, root, Path(place), tracker, log, deadline_s=left_s)
            except subprocess.TimeoutExpired:
                answer = f"; {last_answer(Path(place), began_s)}" if tracker.name == "online" else ""
                return f"the deadline of {tracker.deadline_s:g} s passed{answer}"
    except OSError as error:  # no space, no permission: trouble of the tracker, not of the sweep
        return str(error)
    return None if code == 0 else _last_line(folder / LOG) or f"the publisher ended with {code}"


def _ran(module: str, root: Path, place: Path, tracker: Tracker, log: IO[bytes], *, deadline_s: float) -> int:
    """Return the exit code; nothing that the process starts is left, however the waiting ends.

    It works in `place`, an empty folder that is nobody else's: wandb reads settings from its working
    directory, and Python modules, and a sweep's folder may be writable by others.
    """
    arguments = [
        "--mode",
        tracker.name,
        "--project",
        tracker.project,
        "--deadline-s",
        str(tracker.deadline_s),
    ]
    arguments += [] if tracker.entity is None else ["--entity", tracker.entity]
    mark = secrets.token_hex(8)
    process = subprocess.Popen(  # noqa: S603 (our own module, no shell)
        [sys.executable, "-P", "-m", f"harness.report.{module}", *arguments, "--", str(root)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        cwd=place,
        env=_environment(root / tracker.kind, place) | {MARK: mark},
        start_new_session=True,
    )
    try:
        return process.wait(timeout=deadline_s)
    finally:
        process.kill()
        end_marked(mark)  # wandb-core has a session of its own: no group holds all
        process.wait()


def _environment(folder: Path, place: Path) -> dict[str, str]:
    """Return the environment of the publisher: the user's settings of W&B that matter, and ours.

    Args:
        folder: the tracker's folder, where runs are staged.
        place: where wandb looks for settings of a project, and leaves logs of its own.
    """
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("WANDB_", "TRACKIO_")) or key in _KEPT_SETTINGS
    }
    here = str(Path(__file__).parents[3])
    return kept | {
        "PYTHONPATH": os.pathsep.join(filter(None, [here, kept.get("PYTHONPATH")])),
        "TRACKIO_DIR": str(folder),
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_DISABLE_GIT": "true",
        "WANDB_DISABLE_CODE": "true",
        "WANDB_DIR": str(place),
        "WANDB_CACHE_DIR": str(folder / "cache"),
        "WANDB_DATA_DIR": str(folder / "data"),
    }


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""
