"""The report of a rank, during its life and after: `rank<N>.json`, never half written."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from harness.records.fields import decode_file
from harness.records.files import read_text, remove, write_atomically

_MOST_BYTES = 256 * 2**20  # of a report; it holds what its rank has measured
PHASES = ("build", "instrument", "parity", "timing")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """The state of one rank at one time.

    Fields:
        rank: global rank in the trial.
        state: `started`, `running`, `ok` or `error`; the last two are final.
        phase: one of `PHASES`; in a final report, the phase that was reached.
        time: heartbeat: time of writing, in seconds of `time.time`.
        done, total: number of steps done in the phase, and of all; 0 and 0 where it has no steps.
        kind: class of the exception that ended the rank.
    """

    rank: int
    state: str
    phase: str
    time: float
    done: int = 0
    total: int = 0
    kind: str | None = None
    message: str | None = None
    traceback: str | None = None
    result: dict[str, Any] | None = None

    @property
    def is_final(self) -> bool:
        """True if this is the rank's last report."""
        return self.state in ("ok", "error")

    def write(self, folder: Path) -> None:
        """Replace the rank's file in `folder` at once; an error also survives the machine.

        Raises:
            TypeError: `result` is not made of JSON values.
        """
        text = json.dumps({field.name: getattr(self, field.name) for field in fields(self)})
        # a result survives in the record
        _replace(report_path(folder, self.rank), text, is_durable=self.state == "error")


def report_path(folder: Path, rank: int) -> Path:
    """Return where `rank` reports."""
    return folder / f"rank{rank}.json"


def kept_path(folder: Path, rank: int) -> Path:
    """Return where `rank` keeps what it has measured until it has its result."""
    return folder / f"measured{rank}.json"


def forget(folder: Path, rank: int) -> None:
    """Remove what an earlier run of `rank` has reported and kept."""
    for path in (report_path(folder, rank), kept_path(folder, rank)):
        remove(path, within=folder.parent)


def keep(folder: Path, rank: int, measured: dict[str, Any]) -> None:
    """Write what `rank` has measured so far, for a trial whose time is over before its end.

    Raises:
        TypeError: `measured` is not made of JSON values.
    """
    _replace(kept_path(folder, rank), json.dumps(measured))


def read_kept(folder: Path, world_size: int) -> list[dict[str, Any]]:
    """Return what the ranks of a trial have measured, in order of rank; nothing unless each has something."""
    found = [_read_json(kept_path(folder, rank)) for rank in range(world_size)]
    return found if None not in found else []


def _replace(path: Path, text: str, *, is_durable: bool = False) -> None:
    """Replace a file at once."""
    write_atomically(path, text, within=path.parents[1], is_durable=is_durable)


def log_path(folder: Path, rank: int) -> Path:
    """Return where the output of `rank` goes."""
    return folder / f"rank{rank}.log"


def read_reports(folder: Path) -> dict[int, RankReport]:
    """Return the reports in `folder` by rank; a rank that never reported is missing.

    What stands there under such a name and is no report, left by somebody else or torn, is none.
    """
    found = map(_read, folder.glob("rank*.json"))
    reports = [report for report in found if report is not None]
    return {report.rank: report for report in sorted(reports, key=lambda report: report.rank)}


def _read(path: Path) -> RankReport | None:
    """Return the report in a file, which another node may replace or remove meanwhile."""
    report = decode_file(RankReport, path, _MOST_BYTES)
    if report is None or path.name != f"rank{report.rank}.json" or report.phase not in PHASES:
        return None
    return report


def _read_json(path: Path) -> Any:
    """Return the JSON value in a file, which another node may replace or remove meanwhile; else `None`."""
    try:
        return json.loads(read_text(path, _MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
