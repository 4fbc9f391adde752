"""Ends of Slurm jobs whose trials have left no record."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from harness.launchers import slurm_client as slurm
from harness.launchers.base import End, InFlight, Sweep
from harness.launchers.lane_spec import STOP, TIME_LIMIT_STATUS
from harness.records.claims import folder_of, read_attempt

_SETTLE_S = 3.0
"""How long a job must have been over before its trial counts as lost: other nodes' files arrive late."""

_ENDS = {
    "BOOT_FAIL": ("lost", "a node of {job} failed"),
    "CANCELLED": ("lost", "{job} was cancelled"),
    "DEADLINE": ("timeout", "{job} was ended at its time limit of {time_min} min"),
    "NODE_FAIL": ("lost", "a node of {job} failed"),
    "OUT_OF_MEMORY": ("oom", "{job} was ended by the kernel's memory limit"),
    "PREEMPTED": ("lost", "{job} was preempted and not requeued"),
    "TIMEOUT": ("timeout", "{job} was ended at its time limit of {time_min} min"),
}
"""Status and message of a trial by the state in which its job ended."""


@dataclass(kw_only=True, slots=True)
class Look:
    """Looks for jobs that have ended without a record.

    Fields:
        sweep: whose trials they carry.
        time_min: the time limit, for messages.
    """

    sweep: Sweep
    time_min: int
    _over_since_s: dict[str, float] = field(default_factory=dict)
    _is_unreachable: bool = False

    def ends(self, flights: Sequence[InFlight]) -> dict[str, End | None]:
        """Return the trials that will never have a record."""
        try:
            found = self._ends(flights)
        except slurm.SlurmUnreachableError as error:
            if not self._is_unreachable:
                sys.stderr.write(f"acbench: {error}; waiting for it\n")
            self._is_unreachable = True
            return {}
        self._is_unreachable = False
        return found

    def _ends(self, flights: Sequence[InFlight]) -> dict[str, End | None]:
        """Return how trials ended whose jobs are over; cancel jobs that nothing keeps busy."""
        states = slurm.states({flight.job for flight in flights if flight.job is not None})
        found: dict[str, End | None] = {}
        for flight in flights:
            end = self._end(flight, states)
            if end is None:
                self._over_since_s.pop(flight.task.trial_id, None)
            elif self._is_settled(flight):
                found[flight.task.trial_id] = None if self._was_stopped(flight, end) else end
        slurm.cancel(
            {
                flight.job
                for flight in flights
                if flight.task.trial_id in found
                and flight.job is not None
                and _is_idle(states.get(flight.job))
            }
        )
        return found

    def _end(self, flight: InFlight, states: Mapping[str, slurm.JobState]) -> End | None:
        """Return how a job ended, `None` while it runs or waits."""
        state = states.get(flight.job or "")
        if state is None:
            # forgotten at once where an element is cancelled before it starts, and after minutes otherwise
            why = "it was cancelled before it started, or ended long ago"
            return End(
                status="lost", kind="unknown", message=f"Slurm no longer knows job {flight.job}: {why}"
            )
        if state.is_stuck:
            return End(
                status="lost", kind="LAUNCH_FAILED", message=f"Slurm could not start job {state.job} again"
            )
        if not state.is_over:
            return self._end_of_node(flight, state)
        return end_of(state, self.time_min)

    def _end_of_node(self, flight: InFlight, state: slurm.JobState) -> End | None:
        """Return the end of a job that Slurm has put back into its queue because a node failed under it.

        Until nothing of its last start is left, its lane may still say that it was preempted.
        """
        attempt = read_attempt(self.sweep.store, flight.task.trial_id, flight.submission)
        if attempt is None or attempt.yielded or state.restarts <= attempt.restarts:
            return None
        if state.state == "COMPLETING":
            return None
        where = ", ".join(attempt.hosts)
        return End(status="lost", kind="NODE_FAIL", message=f"a node of job {flight.job} failed ({where})")

    def _is_settled(self, flight: InFlight) -> bool:
        """Return whether the end was first seen long enough ago; listing the folder makes NFS look again."""
        with suppress(OSError):
            list(self.sweep.store.trial_dir(flight.task.trial_id).iterdir())
        first_s = self._over_since_s.setdefault(flight.task.trial_id, time.monotonic())
        return time.monotonic() - first_s >= _SETTLE_S

    def _was_stopped(self, flight: InFlight, end: End) -> bool:
        """Say if the trial never began because a user stopped its sweep, now or in an earlier command."""
        store = self.sweep.store
        has_begun = read_attempt(store, flight.task.trial_id, flight.submission) is not None
        is_stopped = (folder_of(store, flight.submission) / STOP).exists()
        return is_stopped and not has_begun and end.kind in {"CANCELLED", "COMPLETED", "unknown"}


def end_of(state: slurm.JobState, time_min: int) -> End:
    """Return what a job's end means for a trial that it left without a record."""
    job = f"job {state.job}"
    if state.state in _ENDS:
        status, words = _ENDS[state.state]
        return End(status=status, kind=state.state, message=words.format(job=job, time_min=time_min))
    if state.exit_code == TIME_LIMIT_STATUS:
        message = f"{job} came to its time limit of {time_min} min before the trial began"
        return End(status="timeout", kind="TIMEOUT", message=message)
    how = f"signal {state.signal}" if state.signal else f"status {state.exit_code}"
    return End(
        status="lost", kind=state.state, message=f"{job} ended with {how} before the trial left a record"
    )


def _is_idle(state: slurm.JobState | None) -> bool:
    """Return whether Slurm keeps a job whose trial is over: an array's element carries that trial alone."""
    return state is not None and (state.is_stuck or ("_" in state.job and not state.is_over))
