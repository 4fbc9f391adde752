"""Trials of a sweep that nobody runs, and what lanes, drivers and schedulers leave of them on disk."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from harness.launchers.base import Sweep
from harness.launchers.interrupts import Interrupts
from harness.launchers.progress import SweepProgress
from harness.launchers.run_task import PRELOAD
from harness.launchers.task import Point, Task
from harness.ranks.agent import Agent
from harness.ranks.culprit import Outcome
from harness.ranks.forkserver import ForkServer
from harness.records.claims import Attempt
from harness.records.record import Failure, Record
from harness.records.store import Store
from tests.forked_servers import forks_of
from tests.harness import records_fixture
from tests.harness.composing import point_of

AT = "2026-01-01T00:00:00+00:00"
ENVIRONMENT = "0123456789ab"
FAILED = Outcome(
    status="failed", error=Failure(kind="SIGTERM", message="it died", rank=0, phase="parity", log=None)
)


class StandingAgent(Agent):
    """An agent whose fork server, a fork of another, stands from one sweep to the next, until `close`."""

    def __init__(self, server: ForkServer) -> None:
        super().__init__(PRELOAD)
        self._of = server

    def __exit__(self, *_error: object) -> None:
        """Leave the server as it is."""

    def _ready_server(self) -> ForkServer:
        with forks_of(self._of):
            return super()._ready_server()


@cache
def _point(mesh: str) -> Point:
    return point_of(f"model=mlp data=synthetic protocol=smoke protocol.timed_pairs=0 {mesh}")


def task(number: int = 0, mesh: str = "mesh=single") -> Task:
    """Return a trial of its own id for every number."""
    point = _point(mesh)
    assert point.experiment is not None, str(point.refusal)
    return Task(
        trial_id=f"{number:012x}",
        resolved=point.resolved,
        yaml=point.yaml,
        experiment=point.experiment,
        environment_id=ENVIRONMENT,
        place={},
        label=f"trial {number}",
    )


def tasks(count: int, mesh: str = "mesh=single") -> list[Task]:
    return [task(number, mesh) for number in range(count)]


def write_record(
    store: Store, trial_id: str, submission: str | None = None, *, status: str = "ok", **changes: Any
) -> Record:
    """Leave a record, in the way a lane of `submission` does."""
    job = {} if submission is None else {"job": {"submission": submission}}
    record = records_fixture.record() if status == "ok" else records_fixture.failed(status)
    changes = {"trial_id": trial_id, "environment_id": ENVIRONMENT} | changes
    record = replace(record, environment=dict(record.environment) | job, **changes)
    store.write(record)
    return record


def attempt(submission: str, **changes: Any) -> Attempt:
    fields: dict[str, Any] = {"lane": "0", "job": "7", "restarts": 0, "hosts": ("alpha",), "started_at": AT}
    return Attempt(submission=submission, **fields | changes)


def sweep_in(root: Path) -> Sweep:
    return Sweep(
        store=Store(root),
        name="demo",
        rerun=False,
        progress=SweepProgress(),
        interrupts=Interrupts(is_patient=True),
        agent=Agent(),
    )


def error_of(record: Record) -> tuple[str, str, str]:
    """Return status, kind and message of a record that is not good."""
    assert record.error is not None
    return record.status, record.error.kind, record.error.message
