"""The start and the end of a lane, as those who start lanes know them."""

from __future__ import annotations

import pickle
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from harness.launchers.resource_shape import Resources
from harness.launchers.task import Task
from harness.records.claims import folder_of
from harness.records.files import write_atomically
from harness.records.store import Store

PROGRAM = ("-c", "from harness.launchers.lane import main; main()")
"""Words that make Python a lane; the path of its spec follows."""

COMMAND = (sys.executable, *PROGRAM)
"""Starts a lane; the path of its spec follows."""

STOP = "stop"
"""A file in a submission's folder that asks its lanes to end after their running trials."""

TIME_LIMIT_STATUS = 124  # as timeout(1) has it
TERMINATED_STATUS = 128 + signal.SIGTERM


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneSpec:
    """The instructions that a lane gets at its start; they pickle.

    Fields:
        name: unique in its submission.
        submission: submission for which its trials are claimed.
        root: the sweep's folder, absolute.
        tasks: trials of one shape, in order; other lanes may take from the same list.
        resources: what a trial may use of every node.
        sys_path: where Python finds the user's modules.
        driver_pid: process whose death ends the lane; `None` where a scheduler ends it.
    """

    name: str
    launcher: str
    submission: str
    root: Path
    sweep: str
    tasks: tuple[Task, ...]
    resources: Resources
    sys_path: tuple[str, ...]
    driver_pid: int | None = None

    @property
    def folder(self) -> Path:
        """The folder of its submission."""
        return folder_of(Store(self.root), self.submission)

    def write(self) -> Path:
        """Write the spec to the submission's folder, for its user alone, and return its path."""
        path = self.folder / f"lane-{self.name}.pickle"
        write_atomically(path, pickle.dumps(self), within=self.root)
        return path
