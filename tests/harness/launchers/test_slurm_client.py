"""The client against recorded answers of Slurm's commands, which stand on PATH as scripts."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from harness.errors import ConfigError
from harness.launchers import slurm_client as slurm
from harness.launchers.slurm_client import (
    OVER,
    JobState,
    SlurmUnreachableError,
    cancel,
    cluster_gpus,
    cores_a_node,
    hosts,
    max_array_size,
    require_slurm,
    states,
)

Answer = Callable[..., None]


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Return a function that puts a program on PATH; what it was called with is in `<program>.called`."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    put = _putter(tmp_path)
    put("sacct", stderr="Slurm accounting storage is disabled", code=1)
    return put


def _putter(folder: Path) -> Answer:
    def put(program: str, stdout: str = "", *, stderr: str = "", code: int = 0) -> None:
        path = folder / program
        path.write_text(
            f'#!/bin/sh\nprintf "%s\\n" "$@" > {shlex.quote(str(path))}.called\n'
            f"printf '%s' {shlex.quote(stdout)}\nprintf '%s' {shlex.quote(stderr)} >&2\nexit {code}\n"
        )
        path.chmod(0o755)

    return put


SQUEUE = r"""4|N/A|RUNNING|0|0|127.0.0.[2-3]|None
5|0|FAILED|768|0|127.0.0.2|NonZeroExitCode
5|1|CANCELLED|15|1|127.0.0.3|None
5|3,5-6,8-12:2%2|PENDING|0|0||JobArrayTaskLimit
6|N/A|PENDING|0|2||launch failed | requeued held
7|N/A|OUT_OF_MEMORY|0:125|0|gpu01|OutOfMemory
8|N/A|SIGNALING|0|0|gpu01|None
"""


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        pytest.param("4", {"state": "RUNNING", "hosts": ("127.0.0.2", "127.0.0.3")}, id="on two nodes"),
        pytest.param(
            "5_0",
            {"state": "FAILED", "reason": "NonZeroExitCode", "exit_code": 3, "hosts": ("127.0.0.2",)},
            id="wait status",
        ),
        pytest.param(
            "5_1",
            {"state": "CANCELLED", "signal": 15, "restarts": 1, "hosts": ("127.0.0.3",)},
            id="ended by a signal",
        ),
        pytest.param("5_3", {"state": "PENDING", "reason": "JobArrayTaskLimit"}, id="first of a list"),
        pytest.param("5_6", {"state": "PENDING", "reason": "JobArrayTaskLimit"}, id="last of a range"),
        pytest.param("5_10", {"state": "PENDING", "reason": "JobArrayTaskLimit"}, id="within steps"),
        pytest.param("5_12", {"state": "PENDING", "reason": "JobArrayTaskLimit"}, id="last of steps"),
        pytest.param("5_9", None, id="between steps"),
        pytest.param("5", None, id="an array is no job"),
        pytest.param(
            "6",
            {"state": "PENDING", "reason": "launch failed | requeued held", "restarts": 2},
            id="any character in a reason",
        ),
        pytest.param(
            "7",
            {"state": "OUT_OF_MEMORY", "signal": 125, "reason": "OutOfMemory", "hosts": ("gpu01",)},
            id="exit code in words",
        ),
        pytest.param("8", {"state": "SIGNALING", "hosts": ("gpu01",)}, id="for a moment"),
        pytest.param("9", None, id="unknown"),
    ],
)
def test_squeue_is_read(answer: Answer, job: str, expected: dict[str, object] | None) -> None:
    answer("squeue", SQUEUE)
    found = {} if expected is None else {job: JobState(job=job, **expected)}  # type: ignore[arg-type]
    assert states([job]) == found


def test_one_command_asks_about_all_jobs(answer: Answer, tmp_path: Path) -> None:
    answer("squeue", SQUEUE)
    assert list(states(["5_12", "4", "5_0", "5_3"])) == ["5_12", "4", "5_0", "5_3"]
    assert (tmp_path / "squeue.called").read_text().splitlines()[-1] == "--jobs=4,5"
    assert not (tmp_path / "sacct.called").exists()


def test_no_jobs_need_no_command() -> None:
    assert states([]) == {}
    cancel([])


SACCT = """5_0|COMPLETED|0:0|n[1-2]
5_1|CANCELLED by 1000|0:15|n3
5_2|CANCELLED by 1000|0:0|None assigned
5_[3-4]|PENDING|0:0|None assigned
"""


def test_accounting_knows_what_the_controller_forgot(answer: Answer) -> None:
    answer("squeue", stderr="slurm_load_jobs error: Invalid job id specified\n", code=1)
    answer("sacct", SACCT)
    assert states(["5_0", "5_1", "5_2", "5_9"]) == {
        "5_0": JobState(job="5_0", state="COMPLETED", hosts=("n1", "n2")),
        "5_1": JobState(job="5_1", state="CANCELLED", signal=15, hosts=("n3",)),
        "5_2": JobState(job="5_2", state="CANCELLED"),
    }


@pytest.mark.parametrize(
    "fault", [{"stderr": "Slurm accounting storage is disabled", "code": 1}, {"code": 127}, {}], ids=str
)
def test_accounting_that_does_not_answer_says_nothing(answer: Answer, fault: dict[str, object]) -> None:
    answer("squeue")
    answer("sacct", **fault)
    assert states(["5_0"]) == {}


def test_without_accounting_nothing_is_missing(answer: Answer, tmp_path: Path) -> None:
    answer("squeue", SQUEUE)
    (tmp_path / "sacct").unlink()
    os.environ["PATH"] = str(tmp_path)  # monkeypatch restores it
    assert list(states(["4", "9"])) == ["4"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        pytest.param(
            {"stderr": "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"},
            "squeue: slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
            id="connection refused",
        ),
        pytest.param(
            {"stderr": "squeue: error: Invalid job id specified\nsqueue: error: Socket timed out\n"},
            "squeue: squeue: error: Invalid job id specified\nsqueue: error: Socket timed out",
            id="one of two questions",
        ),
        pytest.param({}, "squeue: exit 1", id="ended without a word"),
    ],
)
def test_no_answer_is_no_statement_about_jobs(answer: Answer, fault: dict[str, str], message: str) -> None:
    answer("squeue", **fault, code=1)
    with pytest.raises(SlurmUnreachableError) as raised:
        states(["5_0"])
    assert str(raised.value) == message


def test_a_command_that_hangs_is_no_answer(
    answer: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer("squeue")
    (tmp_path / "squeue").write_text("#!/bin/sh\nexec sleep 1000\n")
    monkeypatch.setattr(slurm, "DEADLINE_S", 0.1)
    with pytest.raises(SlurmUnreachableError, match=r"^squeue: no answer within 0\.1 s$"):
        states(["5_0"])


@pytest.mark.parametrize(
    ("state", "is_over"),
    [
        *((state, True) for state in sorted(OVER)),
        *((state, False) for state in ("PENDING", "RUNNING", "NEW")),
    ],
)
def test_an_unknown_state_may_go_on(state: str, is_over: bool) -> None:
    assert JobState(job="1", state=state).is_over is is_over


@pytest.mark.parametrize(
    ("state", "reason", "is_stuck"),
    [
        ("PENDING", "launch failed requeued held", True),
        ("PENDING", "launch_failed_requeued_held", True),
        ("PENDING", "JobHoldMaxRequeue", True),
        ("REQUEUE_HOLD", "", True),
        ("SPECIAL_EXIT", "", True),
        ("PENDING", "JobHeldUser", False),
        ("PENDING", "BeginTime", False),
        ("RUNNING", "", False),
    ],
)
def test_a_job_that_slurm_holds_is_stuck(state: str, reason: str, is_stuck: bool) -> None:
    assert JobState(job="1", state=state, reason=reason).is_stuck is is_stuck


@pytest.mark.parametrize(
    ("jobs", "words"),
    [
        pytest.param(["7"], ["7"], id="single"),
        pytest.param(["12_3", "7", "12_10", "9_0"], ["7", "9_[0]", "12_[3,10]"], id="grouped by array"),
        pytest.param({"5_1": 1, "5_0": 2}, ["5_[0,1]"], id="any collection"),
    ],
)
def test_arrays_are_cancelled_with_one_word(
    answer: Answer, tmp_path: Path, jobs: Collection[str], words: list[str]
) -> None:
    answer("scancel", stderr="scancel: error: Kill job error on job id 7: Invalid job id specified", code=1)
    cancel(jobs)
    assert (tmp_path / "scancel.called").read_text().split() == words
    cancel(jobs, pending_only=True)
    assert (tmp_path / "scancel.called").read_text().split() == ["--state=PENDING", *words]


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ("MaxArraySize            = 1001\nSchedulerParameters     = bf_interval=1\n", 1001),
        ("MaxArraySize            = 1001\nSchedulerParameters     = bf_interval=1,max_array_tasks=50\n", 50),
        ("MaxArraySize            = 0\n", 1),
        ("SchedulerParameters     = bf_interval=1\n", 1),
    ],
    ids=["usual", "fewer elements than indices", "no arrays", "it does not say"],
)
def test_the_size_of_arrays_is_read(answer: Answer, config: str, size: int) -> None:
    answer("scontrol", config)
    assert max_array_size() == size


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", 0),
        ("gpu:4", 4),
        ("gpu:a100:8(S:0-1,3),shard:16", 8),
        ("gpu:a100:2,gpu:v100:1", 3),
        ("gpu:nvidia_a100_1g.5gb:7(S:0)", 7),
        ("craynetwork:4,lustre:gpu:9", 0),
    ],
)
def test_gpus_of_a_node_are_counted(answer: Answer, gres: str, gpus: int) -> None:
    answer("sinfo", f"main*|16|(null)\nmain*|64|{gres}\nbig|128|gpu:16\n")
    assert (cluster_gpus(None), cores_a_node(None)) == (gpus, 64)


def test_without_a_default_all_partitions_count(answer: Answer) -> None:
    answer("sinfo", "small|16|gpu:1\nbig|128|gpu:16\n")
    assert (cluster_gpus(None), cores_a_node(None)) == (16, 128)


@pytest.mark.parametrize(
    ("nodelist", "expected"),
    [
        ("", ()),
        ("login", ("login",)),
        ("a,b[1-3],c", ("a", "b1", "b2", "b3", "c")),
        ("gpu[08-10,12]", ("gpu08", "gpu09", "gpu10", "gpu12")),
        ("rack[1-2]-n[0,2]", ("rack1-n0", "rack1-n2", "rack2-n0", "rack2-n2")),
        ("n[1-2].cluster", ("n1.cluster", "n2.cluster")),
    ],
)
def test_lists_of_hosts_are_expanded(nodelist: str, expected: tuple[str, ...]) -> None:
    assert hosts(nodelist) == expected


def test_a_machine_without_slurm_is_refused(
    answer: Answer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for program in ("sbatch", "squeue", "scontrol", "sinfo"):
        answer(program)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError) as refused:
        require_slurm()
    assert str(refused.value) == (
        "hydra/launcher: slurm needs sbatch, squeue, scontrol, scancel, sinfo, srun on PATH, and scancel, "
        "srun is missing; run on a machine of the cluster, or use hydra/launcher=local"
    )
