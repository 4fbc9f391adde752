"""What is done to a trial from outside: to its job, its node, or the agent that supervises it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from harness.ranks.rank_report import log_path, read_reports
from harness.records.store import ATTEMPT
from tests.matrix.faults.models import FAULT

CLUSTER = Path(__file__).parents[3] / "slurm" / "cluster.sh"
_POLL_S = 0.05
_CPUS = 5  # of each node: one trial of every shape at once, and no more lanes than this machine can bear


@dataclass(frozen=True, kw_only=True, slots=True)
class Underway:
    """A trial whose last rank stands in its fault.

    Fields:
        folder: of the trial.
        job: of Slurm; `None` without.
        hosts: it runs on.
        ranks_per_node: of the trial.
    """

    folder: Path
    job: str | None
    hosts: tuple[str, ...]
    ranks_per_node: int


Act = Callable[[Sequence[Underway]], AbstractContextManager[None]]
"""Acts when it is entered; repairs what it broke when it is left, after the driver has ended."""


@contextmanager
def private_slurm() -> Iterator[None]:
    """Run a private Slurm of two nodes while the block lasts; this process and its children talk to it.

    A process of its own stops it when our end of a pipe closes: also when we are killed.
    """
    folder = tempfile.mkdtemp(prefix="acb-", dir="/tmp")  # short: it holds Unix sockets
    variables = {
        "CLUSTER_DIR": folder,
        "CLUSTER_NODES": "2",
        "CLUSTER_CPUS": str(_CPUS),
        "SLURM_CONF": f"{folder}/etc/slurm.conf",
    }
    stop = f"cat; '{CLUSTER}' stop; rm -rf '{folder}'"
    with (
        mock.patch.dict(os.environ, variables),
        subprocess.Popen(["/bin/bash", "-c", stop], stdin=subprocess.PIPE, start_new_session=True),
    ):
        run(str(CLUSTER), "start")
        yield


def run(*command: str) -> str:
    """Return what a command prints."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def underway(root: Path, world_sizes: Sequence[int]) -> list[Underway]:
    """Return the trials below `root` that stand in their fault; all other ranks wait for the last one."""
    found = []
    for path in root.glob(f"*/{ATTEMPT}"):
        folder, reports = path.parent, read_reports(path.parent)
        if not (folder / FAULT).exists() or len(reports) not in world_sizes:
            continue
        if any(report.phase != "instrument" for report in reports.values()):
            continue
        attempt = json.loads(path.read_text("utf-8"))
        hosts = tuple(attempt["hosts"])
        each = Underway(
            folder=folder, job=attempt["job"], hosts=hosts, ranks_per_node=len(reports) // len(hosts)
        )
        found.append(each)
    return found


@contextmanager
def _scancel(trials: Sequence[Underway]) -> Iterator[None]:
    run("scancel", *_jobs(trials))
    yield


def _end_after(seconds: int) -> Act:
    @contextmanager
    def act(trials: Sequence[Underway]) -> Iterator[None]:
        for job in _jobs(trials):
            run("scontrol", "update", f"JobId={job}", f"EndTime=now+{seconds}seconds")
        yield

    return act


@contextmanager
def _node_down(trials: Sequence[Underway]) -> Iterator[None]:
    """Let the nodes die with everything on them, and come back when the driver has ended."""
    nodes = sorted({host for each in trials for host in each.hosts})
    while found := _on_nodes():  # a dying daemon may have started another process
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    run("scontrol", "update", f"NodeName={','.join(nodes)}", "State=down", "Reason=bench")
    yield
    for node in nodes:
        run("slurmd", "-N", node)  # with ReturnToService=2 it is up again as soon as it registers


def _signal_agent(node: int, number: int) -> Act:
    @contextmanager
    def act(trials: Sequence[Underway]) -> Iterator[None]:
        for each in trials:
            os.kill(_agent_of(each, node), number)
        yield

    return act


@contextmanager
def _preempt(trials: Sequence[Underway]) -> Iterator[None]:
    nodes = ",".join(sorted({host for each in trials for host in each.hosts}))
    run(
        "sbatch",
        "--partition=high",
        "--exclusive",
        f"--nodelist={nodes}",
        "--output=/dev/null",
        "--wrap=true",
    )
    yield


ACTS: Mapping[str, Act] = {
    "scancel": _scancel,
    "time limit": _end_after(45),
    "killed at limit": _end_after(1),
    "node down": _node_down,
    "agent 0 killed": _signal_agent(0, signal.SIGKILL),
    "agent 1 killed": _signal_agent(1, signal.SIGKILL),
    "agent 1 frozen": _signal_agent(1, signal.SIGSTOP),
    "preempted": _preempt,
}


def await_idle(patience_s: float) -> bool:
    """Wait until Slurm has no job left, so that whatever a job might still do to a record is done.

    Returns:
        Whether all jobs have ended by themselves.
    """
    end_s = time.monotonic() + patience_s
    while run("squeue", "--noheader").strip() and time.monotonic() < end_s:
        time.sleep(_POLL_S)
    if not run("squeue", "--noheader").strip():
        return True
    run("scancel", f"--user={os.getuid()}")
    return False


def _jobs(trials: Sequence[Underway]) -> list[str]:
    return sorted({each.job for each in trials if each.job is not None})


def _agent_of(trial: Underway, node: int) -> int:
    """Return the process that supervises the first rank of a node: the parent of its fork server."""
    log = log_path(trial.folder, node * trial.ranks_per_node)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "fd" / "1").readlink() == log:
                return _parent(_parent(int(process.name)))
        except OSError:  # it has ended, or is not ours
            continue
    raise RuntimeError(f"{log}: no process writes it")


def _on_nodes() -> list[int]:
    """Return the processes of the private cluster's nodes: its daemons there, and what jobs have started."""
    ours = f"SLURM_CONF={os.environ['SLURM_CONF']}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is not ours
            variables = (process / "environ").read_bytes().split(b"\0")
            is_of_a_job = any(each.startswith(b"SLURM_JOB_ID=") for each in variables)
            name = (process / "comm").read_text("utf-8").strip()
            if ours in variables and (is_of_a_job or name in {"slurmd", "slurmstepd"}):
                found.append(int(process.name))
    return found


def _parent(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    return int(fields[1])
