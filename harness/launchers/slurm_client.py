"""The client side of Slurm: what its commands say about jobs and nodes, and how jobs are ended.

Only the controller's own memory is needed (`squeue`), which forgets a job some minutes after its end
(`MinJobAge`, 300 s by default); where accounting answers (`sacct`), it is asked about what was forgotten.
Works with Slurm 20.11 and later. It imports no torch and no submitit.

RuntimeError
└── SlurmUnreachableError    the controller did not answer; says nothing about any job
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from harness.errors import ConfigError

PROGRAMS = ("sbatch", "squeue", "scontrol", "scancel", "sinfo", "srun")

DEADLINE_S = 60.0
"""Time for one command; a client itself gives up on a controller after 10 s by default (`MessageTimeout`)."""

OVER = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL",
    "OUT_OF_MEMORY", "PREEMPTED", "RECONFIG_FAIL", "REVOKED", "TIMEOUT",
})  # fmt: skip
"""States that a job does not leave, unless somebody requeues it. All others, also unknown ones, may go on."""

_HELD_REASONS = {"launch failed requeued held", "JobHoldMaxRequeue"}
_SACCT_DEADLINE_S = 20.0
_COLUMNS = ("ArrayJobID", "ArrayTaskID", "State", "exit_code", "restartcnt", "NodeList", "Reason")
_GONE = re.compile("Invalid job id specified|Job/step already completing or completed")
_OPTIONS = re.compile("(SACCT|SCANCEL|SCONTROL|SINFO|SQUEUE)_|SLURM_CLUSTERS$")


class SlurmUnreachableError(RuntimeError):
    """A command of Slurm got no answer: ask again later, and conclude nothing about any job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """The state of one job, as Slurm says it.

    Fields:
        job: `"123"`, or `"123_4"` for an element of an array.
        state: Slurm's long name (`PENDING`, `RUNNING`, `TIMEOUT`).
        reason: why it waits or why it ended, in Slurm's words; empty where there is none.
        exit_code: exit status of the batch script; 0 while it runs.
        signal: number of the signal that ended the batch script; 0 where none did.
        restarts: how often it was requeued; 0 where only accounting knows the job.
        hosts: where it runs or ran; empty while it waits.
    """

    job: str
    state: str
    reason: str = ""
    exit_code: int = 0
    signal: int = 0
    restarts: int = 0
    hosts: tuple[str, ...] = ()

    @property
    def is_over(self) -> bool:
        """True if the job has ended and will not start again by itself."""
        return self.state in OVER

    @property
    def is_stuck(self) -> bool:
        """True if Slurm holds the job, which could not be started again, until somebody releases it."""
        is_held = self.state == "PENDING" and self.reason.replace("_", " ") in _HELD_REASONS
        return is_held or self.state in {"REQUEUE_HOLD", "SPECIAL_EXIT"}


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """Options of sbatch that all jobs share.

    Fields:
        time_min: time limit of a job in minutes.
        partition, account, qos, constraint: options of sbatch; `None` is the user's or the cluster's default.
        signal_delay_s: seconds before the time limit at which a running trial is ended and recorded; SIGUSR2
            may come up to 60 s early.
        requeue: let Slurm put a preempted job, or one whose node failed, back into its queue; its trials then
            run again.
        setup: shell lines that run in every job first (`module load cuda`).
        python: shell command of the interpreter in a job; this one when `None`.
        additional_parameters: any other option of sbatch, `{reservation: x}`, by its name with dashes or
            underscores; `True` for one that takes no value. They win over all others.
    """

    time_min: int = 60
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    signal_delay_s: int = 60
    requeue: bool = True
    setup: tuple[str, ...] = ()
    python: str | None = None
    additional_parameters: dict[str, Any] | None = None


def require_slurm() -> None:
    """Refuse a machine that cannot talk to Slurm. Raises ConfigError: one of its commands is missing."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        raise ConfigError(
            "hydra/launcher",
            f"slurm needs {', '.join(PROGRAMS)} on PATH, and {', '.join(missing)} is missing; "
            "run on a machine of the cluster, or use hydra/launcher=local",
        )


def states(jobs: Collection[str]) -> dict[str, JobState]:
    """Return the states of `jobs`, with one command for all; those that nobody knows are absent.

    Absent are jobs that the controller has forgotten, where there is no accounting, and elements of an array
    that were cancelled one by one before they started: of those it keeps nothing.

    Args:
        jobs: ids as `submit` returns them; elements of an array are asked for one by one.

    Raises:
        SlurmUnreachableError: the controller did not answer.
    """
    if not jobs:
        return {}
    found = _from_squeue(f"--jobs={','.join(sorted({_array_id(job) for job in jobs}))}")
    forgotten = set(jobs) - found.keys()
    if forgotten:
        found |= _from_sacct(forgotten)
    return {job: found[job] for job in jobs if job in found}


def find(name: str) -> list[str]:
    """Return the ids of the user's jobs of this name that the controller remembers, oldest first.

    For submissions whose ids were never written down.

    Raises:
        SlurmUnreachableError: the controller did not answer.
    """
    return sorted(_from_squeue(f"--name={name}", f"--user={os.getuid()}"), key=_numbers)


def cancel(jobs: Collection[str], *, pending_only: bool = False) -> None:
    """End `jobs`; those that have ended or are unknown are no error.

    Raises:
        SlurmUnreachableError: the controller did not answer.
    """
    if jobs:
        _ask("scancel", *(["--state=PENDING"] if pending_only else []), *_grouped(jobs))


def max_array_size() -> int:
    """Return how many elements one array may have here; 1 where the cluster has no arrays.

    Raises:
        SlurmUnreachableError: the controller did not answer.
    """
    settings = _ask("scontrol", "show", "config")
    limits = re.findall(r"^MaxArraySize\s*=\s*(\d+)|\bmax_array_tasks=(\d+)", settings, flags=re.MULTILINE)
    return max(1, min((int(size or tasks) for size, tasks in limits), default=1))


def cluster_gpus(partition: str | None) -> int:
    """Return the GPUs of the best equipped node of a partition; 0 where none has any.

    Args:
        partition: name, or names with commas; `None`: the cluster's default.

    Raises:
        ConfigError: there is no such partition.
        SlurmUnreachableError: the controller did not answer.
    """
    return max(_gpus(gres) for _, gres in _nodes(partition))


def cores_a_node(partition: str | None) -> int:
    """Return the CPUs, as Slurm counts them, of the best equipped node of a partition.

    Args:
        partition: name, or names with commas; `None`: the cluster's default.

    Raises:
        ConfigError: there is no such partition.
        SlurmUnreachableError: the controller did not answer.
    """
    return max(cpus for cpus, _ in _nodes(partition))


def hosts(nodelist: str) -> tuple[str, ...]:
    """Return the hosts of a list as Slurm writes it: `"gpu[08-10],login"` is gpu08, gpu09, gpu10, login."""
    entries = re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    return tuple("".join(parts) for entry in entries for parts in product(*_alternatives(entry)))


def _alternatives(entry: str) -> Iterator[list[str]]:
    """Yield for each part of `rack[1-2]-n[08,10]` what may stand there."""
    for text, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", entry):
        yield [text] if text else [number for each in ranges.split(",") for number in _range(each)]


def _range(text: str) -> list[str]:
    """Return the numbers of `08-10` with their zeros."""
    first, _, last = text.partition("-")
    return [f"{number:0{len(first)}}" for number in range(int(first), int(last or first) + 1)]


def _from_squeue(*selection: str) -> dict[str, JobState]:
    columns = ",".join(f"{name}:0|" for name in _COLUMNS).removesuffix("|")  # as wide as they are
    listing = _ask("squeue", "--noheader", "--all", "--states=all", f"--Format={columns}", *selection)
    return {state.job: state for line in listing.splitlines() for state in _states_of(line)}


def _states_of(line: str) -> Iterator[JobState]:
    """Yield what one line of squeue says: one job, or all elements of an array that wait.

    `squeue --array` would write a line an element, but Slurm 22.05 forgets the last of `0-8:2`.
    """
    array, elements, state, ending, restarts, nodelist, reason = line.split("|", len(_COLUMNS) - 1)
    code, signal = _ending(ending)
    for job in [array] if elements == "N/A" else [f"{array}_{index}" for index in _indices(elements)]:
        yield JobState(
            job=job,
            state=state,
            reason="" if reason == "None" else reason,
            exit_code=code,
            signal=signal,
            restarts=int(restarts),
            hosts=hosts(nodelist),
        )


def _indices(elements: str) -> Iterator[int]:
    """Yield the numbers in `0,4-5,8-12:2%7`, where 7 run at a time."""
    for part in elements.partition("%")[0].split(","):
        bounds, _, step = part.partition(":")
        first, _, last = bounds.partition("-")
        yield from range(int(first), int(last or first) + 1, int(step or 1))


def _from_sacct(jobs: Collection[str]) -> dict[str, JobState]:
    """Return what accounting knows about `jobs`: nothing where there is none or it does not answer."""
    ids = ",".join(sorted({_array_id(job) for job in jobs}))
    try:
        listing = _ask(
            "sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={ids}",
            "--format=JobID,State,ExitCode,NodeList",
        )  # fmt: skip
    except (FileNotFoundError, SlurmUnreachableError):
        return {}
    found = {}
    for line in listing.splitlines():
        job, state, ending, nodelist = line.split("|")
        code, signal = _ending(ending)
        found[job] = JobState(
            job=job,
            state=state.partition(" ")[0],  # "CANCELLED by 1000"
            exit_code=code,
            signal=signal,
            hosts=() if nodelist == "None assigned" else hosts(nodelist),
        )
    return found


def _ending(text: str) -> tuple[int, int]:
    """Return exit code and signal of `2:0`, or of the wait status that squeue prints."""
    if ":" in text:
        code, _, signal = text.partition(":")
        return int(code), int(signal)
    return int(text) >> 8, int(text) & 0x7F


def _nodes(partition: str | None) -> list[tuple[int, str]]:
    choice = [] if partition is None else [f"--partition={partition}"]
    lines = _ask("sinfo", "--noheader", "--Node", "--format=%P|%c|%G", *choice).splitlines()
    rows = [line.split("|") for line in lines]
    if partition is None:
        rows = [row for row in rows if row[0].endswith("*")] or rows
    if not rows:
        known = sorted(set(_ask("sinfo", "--noheader", "--format=%R").split()))
        raise ConfigError("hydra.launcher.partition", f"must be one of {', '.join(known)}, got {partition!r}")
    return [(int(cpus), gres) for _, cpus, gres in rows]


def _gpus(gres: str) -> int:
    """Return the GPUs in `gpu:a100:8(S:0-1),shard:16`."""
    resources = [each.split(":") for each in re.sub(r"\([^)]*\)", "", gres).split(",")]
    return sum(int(words[-1]) for words in resources if words[0] == "gpu")


def _ask(program: str, *arguments: str) -> str:
    """Return what a command of Slurm prints; jobs that it does not know are no error.

    Raises:
        SlurmUnreachableError: it failed, was killed, or did not end in time.
    """
    deadline_s = _SACCT_DEADLINE_S if program == "sacct" else DEADLINE_S
    try:
        done = subprocess.run(  # noqa: S603 (a program of Slurm, without a shell)
            [program, *arguments],
            env=_environment(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SlurmUnreachableError(f"{program}: no answer within {deadline_s:g} s") from error
    problems = done.stderr.splitlines()
    if done.returncode and not (problems and all(_GONE.search(line) for line in problems)):
        raise SlurmUnreachableError(f"{program}: {done.stderr.strip() or f'exit {done.returncode}'}")
    return done.stdout


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return `variables` without those that are options, because a user's own filters would hide jobs.

    Lists of array elements come whole; Slurm cuts them at 64 characters otherwise.
    """
    kept = {name: value for name, value in variables.items() if not _OPTIONS.match(name)}
    return kept | {"SLURM_BITSTR_LEN": "0"}


def _array_id(job: str) -> str:
    return job.partition("_")[0]


def _numbers(job: str) -> tuple[int, int]:
    array, _, index = job.partition("_")
    return int(array), int(index or 0)


def _grouped(jobs: Collection[str]) -> list[str]:
    """Return `jobs` with one word an array, `123_[0,2]`, which is one request to the controller."""
    elements: defaultdict[str, list[str]] = defaultdict(list)
    for job in sorted(jobs, key=_numbers):
        array, _, index = job.partition("_")
        elements[array] += [index] if index else []
    return [f"{array}_[{','.join(indices)}]" if indices else array for array, indices in elements.items()]
