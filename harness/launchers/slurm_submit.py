"""Submits calls of Python to Slurm, with submitit: one array for calls of one shape.

What a job calls stands in its batch script, which Slurm has from the moment of submission. submitit's own
way, a pickled function in a file that the job loads, would run whatever stands there by then.

ConfigError
└── SubmissionError    sbatch did not take the jobs; none of them is in the queue
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from submitit import SlurmExecutor
from submitit.core.utils import FailedJobError, FailedSubmissionError, JobPaths

from harness.errors import ConfigError
from harness.launchers.slurm_client import JobOptions, cancel, max_array_size
from harness.records.files import make_folder

_USERS_CHOICE = ("account", "partition", "qos", "constraint", "reservation")
"""Options for which a user's `SBATCH_...` variable counts, unless the request has its own value. What else
such variables say (time, shape, output) would silently replace what acbench has decided."""

_KEPT_VARIABLES = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})
"""How clients find the controller. The others describe the job that the driver itself may run in."""


class SubmissionError(ConfigError):
    """sbatch did not take the jobs."""

    def __init__(self, answer: str) -> None:
        super().__init__("hydra.launcher", f"sbatch did not take the jobs: {answer}")
        self.answer = answer

    def __reduce__(self) -> tuple[type[SubmissionError], tuple[str]]:
        return type(self), (self.answer,)


NODES_END_TOGETHER = ("--kill-on-bad-exit=0", "--wait=60")
"""Options of srun: node 0 shall say what became of another; when one has ended, the others have a minute to
end by themselves. One that is frozen would keep the job until its time limit."""


@dataclass(frozen=True, slots=True)
class JobCall:
    """The work of one job on each of its nodes.

    Fields:
        words: what follows the interpreter on the command line; no secret, which every user can read there.
    """

    words: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request(JobOptions):
    """The resources of each job of a submission; one process starts on each of its nodes.

    Fields:
        nodes: number of nodes of each job, >= 1.
        gpus_per_node: 0 asks for none.
        array_parallelism: jobs of one array that run at a time; `None`: as many as fit.
        use_srun: start one process on each node; otherwise one on the first node, outside of any step.
    """

    name: str
    nodes: int = 1
    gpus_per_node: int = 0
    cpus_per_task: int = 1
    array_parallelism: int | None = None
    use_srun: bool = True


def submit(calls: Sequence[JobCall], request: Request, folder: Path) -> list[str]:
    """Submit one job a call, as few arrays as the cluster allows, and return their ids in the same order.

    The jobs get the environment of this process without what Slurm itself has set in it.

    Args:
        folder: on a file system that the nodes share; gets scripts and logs.

    Raises:
        ConfigError: the folder's name means something else to Slurm.
        SubmissionError: sbatch did not take them; those of earlier arrays are cancelled.
        SlurmUnreachableError: the controller did not answer before the first was submitted.
    """
    if re.search(r"[%\\]", str(folder.absolute())):
        raise ConfigError(
            "outputs_dir", rf"must hold no % and no \, which Slurm replaces in names of logs, got '{folder}'"
        )
    size = max_array_size()
    jobs: list[str] = []
    for start in range(0, len(calls), size):
        try:
            jobs += _submit_array(calls[start : start + size], request, folder)
        except SubmissionError:
            cancel(jobs)
            raise
    return jobs


def _submit_array(calls: Sequence[JobCall], request: Request, folder: Path) -> list[str]:
    """Submit the calls as one array of jobs; return the id of each."""
    executor = SlurmExecutor(folder, python=request.python)
    executor.update_parameters(**_parameters(request, calls))
    make_folder(JobPaths.get_first_id_independent_folder(folder), within=folder.parent)
    is_array = len(calls) > 1
    if is_array:
        executor.parameters["map_count"] = len(calls)
    variables = _variables(os.environ, _options(request))
    # submitit prints what sbatch says before it raises it
    with _environment(variables), contextlib.redirect_stderr(io.StringIO()):
        try:
            job = executor._submit_command(f'{executor.python} -u "$@"').job_id  # noqa: SLF001 (see the top)
        except (FailedJobError, FailedSubmissionError) as error:
            raise SubmissionError(str(error).strip()) from error
    return [f"{job}_{index}" for index in range(len(calls))] if is_array else [job]


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Give this process exactly these environment variables inside the block."""
    before = dict(os.environ)
    for name in before.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _parameters(request: Request, calls: Sequence[JobCall]) -> dict[str, Any]:
    options = _options(request)
    return {
        "additional_parameters": options,
        "array_parallelism": request.array_parallelism or len(calls),
        # since Slurm 22.05 srun does not take the CPUs of a task from the job
        "setup": [*request.setup, "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK", *_choice(calls)],
        "signal_delay_s": request.signal_delay_s,
        "srun_args": list(NODES_END_TOGETHER),
        "time": request.time_min,
        "use_srun": request.use_srun,
        "wckey": None,  # submitit's own default is refused where these keys are tracked
    }


def _choice(calls: Sequence[JobCall]) -> list[str]:
    """Return shell lines that make the words of a job's own call its positional parameters."""
    return [
        "case ${SLURM_ARRAY_TASK_ID:-0} in",
        *(f"{index}) set -- {shlex.join(call.words)} ;;" for index, call in enumerate(calls)),
        "esac",
    ]


def _options(request: Request) -> dict[str, Any]:
    options = {
        "job_name": request.name,
        "time": request.time_min,
        "nodes": request.nodes,
        "ntasks_per_node": 1,
        "cpus_per_task": request.cpus_per_task,
        "gpus_per_node": request.gpus_per_node or None,
        "partition": request.partition,
        "account": request.account,
        "qos": request.qos,
        "constraint": request.constraint,
        "requeue" if request.requeue else "no_requeue": True,
    } | {name.replace("-", "_"): value for name, value in (request.additional_parameters or {}).items()}
    return {name: value for name, value in options.items() if value is not None and value is not False}


def _variables(variables: Mapping[str, str], options: Mapping[str, Any]) -> dict[str, str]:
    choices = {f"SBATCH_{name.upper()}" for name in _USERS_CHOICE if name not in options}
    kept = _KEPT_VARIABLES | choices
    foreign = re.compile("(SLURM|SLURMD|SRUN|SBATCH|SUBMITIT)_")
    return {name: value for name, value in variables.items() if name in kept or not foreign.match(name)}
