"""What a submission asks of sbatch, without one."""

from __future__ import annotations

import pickle
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from harness.errors import ConfigError
from harness.launchers import slurm_submit as submission
from harness.launchers.slurm_submit import JobCall, Request, SubmissionError, submit


@pytest.fixture
def cancelled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arrays have at most two elements; the list gets what is cancelled."""
    jobs: list[str] = []

    def cancel(several: Collection[str]) -> None:
        jobs.extend(several)

    monkeypatch.setattr(submission, "max_array_size", lambda: 2)
    monkeypatch.setattr(submission, "cancel", cancel)
    return jobs


def test_a_submission_is_taken_whole_or_not_at_all(
    cancelled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "srun").write_text("#!/bin/sh\n")
    (bin_ / "sbatch").write_text(
        f"#!/bin/sh\n[ -e {tmp_path}/first ] && {{ echo 'sbatch: error: QOSMaxSubmitJob' >&2; exit 1; }}\n"
        f"touch {tmp_path}/first\necho Submitted batch job 7\n"
    )
    for program in bin_.iterdir():
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_}:/usr/bin:/bin")
    with pytest.raises(SubmissionError) as refused:
        submit([JobCall(("-c", "pass"))] * 5, Request(name="x", time_min=1), tmp_path / "jobs")
    assert str(refused.value) == (
        "hydra.launcher: sbatch did not take the jobs: sbatch: error: QOSMaxSubmitJob"
    )
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)
    assert cancelled == ["7_0", "7_1"]


def test_what_a_job_calls_stands_in_its_batch_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sbatch hands out its script; each element runs the words of its own call, and reads no pickle."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "srun").write_text("#!/bin/sh\n")
    (bin_ / "sbatch").write_text(f"#!/bin/sh\ncp $1 {tmp_path}/script\necho Submitted batch job 7\n")
    for program in bin_.iterdir():
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_}:/usr/bin:/bin")
    monkeypatch.setattr(submission, "max_array_size", lambda: 9)
    todo = [JobCall(("it's", word)) for word in ("a b", "$HOME")]
    request = Request(name="x", time_min=1, use_srun=False, python="printf '%s|'")
    assert submit(todo, request, tmp_path / "jobs") == ["7_0", "7_1"]
    said = [
        subprocess.run(
            ["bash", tmp_path / "script"],
            env={"SLURM_ARRAY_TASK_ID": str(index)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for index in range(2)
    ]
    assert said == ["-u|it's|a b|", "-u|it's|$HOME|"]
    assert list(tmp_path.rglob("*.pkl")) == []


@pytest.mark.parametrize("name", ["50%", r"back\slash"])
@pytest.mark.usefixtures("cancelled")
def test_a_folder_that_means_something_else_to_slurm_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        submit([JobCall(("-c", "pass"))], Request(name="x", time_min=1), tmp_path / name)
    assert str(refused.value) == (
        "outputs_dir: must hold no % and no \\, which Slurm replaces in names of logs, "
        f"got '{tmp_path / name}'"
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param(
            {}, {"requeue": True, "nodes": 1, "cpus_per_task": 1, "ntasks_per_node": 1}, id="defaults"
        ),
        pytest.param({"gpus_per_node": 0}, {"gpus_per_node": None}, id="no GPU is no option"),
        pytest.param(
            {"gpus_per_node": 2, "additional_parameters": {"mem": "4G"}},
            {"gpus_per_node": 2, "mem": "4G"},
            id="resources",
        ),
        pytest.param({"requeue": False}, {"requeue": None, "no_requeue": True}, id="no second attempt"),
        pytest.param(
            {
                "partition": "a",
                "additional_parameters": {"partition": "b", "cpus-per-task": 9, "hold": False},
            },
            {"partition": "b", "cpus_per_task": 9, "hold": None},
            id="additional parameters win",
        ),
    ],
)
def test_fields_become_options(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    options = submission._options(Request(name="x", time_min=3, **fields))
    assert {name: options.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("name", "options", "is_kept"),
    [
        ("HOME", {}, True),
        ("SLURMISH", {}, True),
        ("SLURM_CONF", {}, True),
        ("SLURM_JOB_ID", {}, False),
        ("SRUN_CPUS_PER_TASK", {}, False),
        ("SUBMITIT_EXECUTOR", {}, False),
        ("SBATCH_ACCOUNT", {}, True),
        ("SBATCH_ACCOUNT", {"account": "other"}, False),
        ("SBATCH_PARTITION", {"account": "other"}, True),
        ("SBATCH_TIMELIMIT", {}, False),
        ("SBATCH_EXPORT", {}, False),
    ],
)
def test_variables_that_reach_sbatch(name: str, options: dict[str, Any], is_kept: bool) -> None:
    assert submission._variables({name: "1"}, options) == ({name: "1"} if is_kept else {})
