"""The client against real daemons: what it says about jobs through their lives and at their ends."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.errors import ConfigError
from harness.launchers.slurm_client import (
    JobState,
    SlurmUnreachableError,
    cancel,
    cluster_gpus,
    cores_a_node,
    find,
    hosts,
    max_array_size,
    states,
)
from harness.launchers.slurm_submit import JobCall, Request, SubmissionError, submit
from tests.slurm import calls
from tests.slurm.calls import call_of
from tests.slurm.private_slurm import Cluster, private_cluster

ROOT = Path(__file__).parents[2]
PATIENCE_S = 200


def _request(**fields: Any) -> Request:
    defaults: dict[str, Any] = {"name": "probe", "time_min": 5, "setup": (f"cd '{ROOT}'",)}
    return Request(**(defaults | fields))


def _submit_stay(folder: Path, **fields: Any) -> str:
    [job] = submit([call_of(calls.stay, folder)], _request(**fields), folder / "jobs")
    return job


def _submit_running(folder: Path, **fields: Any) -> str:
    """Submit a job that stays and return its id once all of its nodes have started."""
    job = _submit_stay(folder, **fields)
    _until(lambda: len(list(folder.glob("started.*.0"))) == fields.get("nodes", 1))
    return job


def _until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end_s, f"not within {PATIENCE_S} s"
        time.sleep(0.1)


def _end(job: str) -> JobState:
    """Return the state of a job when it is over."""
    _until(lambda: states([job])[job].is_over)
    return states([job])[job]


def _seen(folder: Path) -> dict[str, dict[str, str]]:
    return {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}


def test_calls_of_one_submission_are_elements_of_one_array(cluster: Cluster, tmp_path: Path) -> None:
    codes = (0, 3, 0, 0, 7)
    todo = [call_of(calls.leave, tmp_path, code) for code in codes]
    jobs = submit(todo, _request(), tmp_path / "jobs")
    array = jobs[0].partition("_")[0]
    assert jobs == [f"{array}_{index}" for index in range(5)]
    ends = [_end(job) for job in jobs]
    assert [end.job for end in ends] == jobs
    assert [end.exit_code for end in ends] == list(codes)
    assert [end.state for end in ends] == ["COMPLETED", "FAILED", "COMPLETED", "COMPLETED", "FAILED"]
    assert [end.reason for end in ends] == ["", "NonZeroExitCode", "", "", "NonZeroExitCode"]
    assert {end.hosts for end in ends} <= {(host,) for host in cluster.hosts}
    assert sorted(_seen(tmp_path)) == [f"{index}.node0.json" for index in range(5)]


def test_one_process_starts_on_each_node_with_its_devices(cluster: Cluster, tmp_path: Path) -> None:
    call = call_of(calls.leave, tmp_path)
    [job] = submit([call], _request(nodes=2, gpus_per_node=3, cpus_per_task=5), tmp_path / "jobs")
    assert _end(job) == JobState(job=job, state="COMPLETED", hosts=cluster.hosts)
    seen = _seen(tmp_path)
    assert sorted(seen) == [f"{job}.node0.json", f"{job}.node1.json"]
    for variables in seen.values():
        assert hosts(variables["SLURM_JOB_NODELIST"]) == cluster.hosts
        assert variables["CUDA_VISIBLE_DEVICES"] == "0,1,2"
        assert variables["SRUN_CPUS_PER_TASK"] == variables["SLURM_CPUS_PER_TASK"] == "5"


@pytest.mark.usefixtures("cluster")
def test_a_job_waits_runs_and_ends(tmp_path: Path) -> None:
    job = _submit_stay(tmp_path, additional_parameters={"hold": True})
    assert states([job]) == {job: JobState(job=job, state="PENDING", reason="JobHeldUser")}


def test_a_job_is_seen_while_it_runs_and_after_it(cluster: Cluster, tmp_path: Path) -> None:
    job = _submit_running(tmp_path, nodes=2)
    assert states([job, "4000000"]) == {job: JobState(job=job, state="RUNNING", hosts=cluster.hosts)}
    (tmp_path / "release").touch()
    assert _end(job) == JobState(job=job, state="COMPLETED", hosts=cluster.hosts)


@pytest.mark.usefixtures("cluster")
def test_a_cancelled_job_says_so(tmp_path: Path) -> None:
    job = _submit_running(tmp_path)
    cancel([job, "4000000"])
    assert _end(job).state == "CANCELLED"
    cancel([job])


@pytest.mark.usefixtures("cluster")
def test_pending_jobs_alone_can_be_cancelled(tmp_path: Path) -> None:
    todo = [call_of(calls.stay, tmp_path)] * 4
    jobs = submit(todo, _request(array_parallelism=1), tmp_path / "jobs")
    _until((tmp_path / "started.0.0").exists)
    cancel(jobs, pending_only=True)
    assert {job: state.state for job, state in states(jobs).items()} == {jobs[0]: "RUNNING"}


@pytest.mark.usefixtures("cluster")
def test_elements_are_cancelled_without_their_array(tmp_path: Path) -> None:
    todo = [call_of(calls.stay, tmp_path)] * 300
    jobs = submit(todo, _request(additional_parameters={"hold": True}), tmp_path / "jobs")
    cancel(jobs[1::2])
    assert list(states(jobs)) == jobs[::2]


def test_a_time_limit_is_a_state_of_its_own(cluster: Cluster, tmp_path: Path) -> None:
    job = _submit_running(tmp_path, signal_delay_s=1)
    cluster.run("scontrol", "update", f"jobid={job}", "EndTime=now")  # noticed within 30 s
    end = _end(job)
    assert (end.state, end.reason) == ("TIMEOUT", "TimeLimit")


def test_a_lost_node_is_a_state_of_its_own(cluster: Cluster, tmp_path: Path) -> None:
    job = _submit_running(tmp_path, nodes=2, requeue=False)
    cluster.run("scontrol", "update", f"nodename={cluster.hosts[1]}", "state=down", "reason=test")
    end = _end(job)
    assert (end.state, end.reason, end.hosts) == ("NODE_FAIL", "NodeDown", cluster.hosts)


def test_a_preempted_job_starts_again_and_is_never_over_between(cluster: Cluster, tmp_path: Path) -> None:
    job = _submit_running(tmp_path, partition="low", nodes=2)
    _preempt(cluster)
    seen: list[JobState] = []

    def has_restarted() -> bool:
        seen.append(states([job])[job])
        return (tmp_path / "started.0.1").exists()

    _until(has_restarted)
    # the second run may be over by the time that its start is seen
    assert [state for state in seen if state.is_over and not state.restarts] == []
    assert _end(job) == JobState(job=job, state="COMPLETED", restarts=1, hosts=cluster.hosts)


def test_a_preempted_job_that_must_not_start_again_is_over(cluster: Cluster, tmp_path: Path) -> None:
    job = _submit_running(tmp_path, partition="low", requeue=False)
    _preempt(cluster)
    assert _end(job).state == "PREEMPTED"


def _preempt(cluster: Cluster) -> None:
    cluster.run("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")


def test_large_submissions_are_split_and_forgotten_jobs_are_asked_of_accounting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with private_cluster(nodes=1, settings="MaxArraySize=3 MinJobAge=2") as small:
        monkeypatch.setenv("SLURM_CONF", str(small.conf))
        assert max_array_size() == 3
        todo = [call_of(calls.leave, tmp_path)] * 7
        jobs = submit(todo, _request(), tmp_path / "jobs")
        first, second, third = (jobs[index].partition("_")[0] for index in (0, 3, 6))
        assert jobs == [*(f"{array}_{index}" for array in (first, second) for index in range(3)), third]
        _until(lambda: states(jobs) == {})  # done and forgotten, and this cluster has no accounting
        _write_sacct(tmp_path / "bin", f"{jobs[0]}|COMPLETED|0:0|127.0.0.2\n{jobs[0]}0|FAILED|1:0|127.0.0.2")
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
        assert states(jobs) == {jobs[0]: JobState(job=jobs[0], state="COMPLETED", hosts=("127.0.0.2",))}


def _write_sacct(folder: Path, answer: str) -> None:
    folder.mkdir()
    (folder / "sacct").write_text(f"#!/bin/sh\ncat <<'END'\n{answer}\nEND\n")
    (folder / "sacct").chmod(0o755)


@pytest.mark.usefixtures("cluster")
def test_jobs_are_found_by_name(tmp_path: Path) -> None:
    held = {"hold": True}
    todo = [call_of(calls.stay, tmp_path)] * 11
    array = submit(todo, _request(name="sweep-1", additional_parameters=held), tmp_path / "jobs")
    single = _submit_stay(tmp_path, name="sweep-1", additional_parameters=held)
    _submit_stay(tmp_path, name="sweep-10", additional_parameters=held)
    cancel([single])
    assert find("sweep-1") == [*array, single]
    assert find("sweep-2") == []


@pytest.mark.usefixtures("cluster")
def test_a_refused_submission_quotes_sbatch(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SubmissionError) as refused:
        _submit_stay(tmp_path, partition="nowhere")
    assert str(refused.value) == (
        "hydra.launcher: sbatch did not take the jobs: sbatch: error: invalid partition specified: nowhere\n"
        "sbatch: error: Batch job submission failed: Invalid partition name specified"
    )
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("cluster")
def test_any_option_of_sbatch_can_be_given(cluster: Cluster, tmp_path: Path) -> None:
    options = {
        "time": "0:07:00",
        "comment": "it's #1",
        "cpus-per-task": 4,
        "exclusive": True,
        "nice": 5,
        "gres": None,
    }
    job = _submit_stay(tmp_path, additional_parameters=options | {"hold": True, "spread-job": False})
    said = cluster.run("scontrol", "show", "job", job)
    for expected in ("TimeLimit=00:07:00", "Comment=it's #1", "CPUs/Task=4", "OverSubscribe=NO", "Nice=5"):
        assert expected in said


def test_the_shell_decides_who_pays_and_where_and_nothing_else(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inherited = {
        "SBATCH_PARTITION": "low",
        "SBATCH_TIMELIMIT": "77",
        "SBATCH_WAIT": "1",
        "SLURM_JOB_ID": "4000000",
        "SLURM_CPU_BIND": "map_cpu:9",
        "SLURM_MEM_PER_NODE": "1",
        "SLURM_MEM_PER_CPU": "1",
        "SLURM_NTASKS": "3",
        "SLURM_TEST_LEFT_OVER": "yes",
        "SQUEUE_PARTITION": "high",
        "SQUEUE_FORMAT": "%i",
        "SCANCEL_INTERACTIVE": "1",
    }
    for name, value in inherited.items():
        monkeypatch.setenv(name, value)
    [job] = submit([call_of(calls.leave, tmp_path)], _request(), tmp_path / "jobs")
    assert _end(job).state == "COMPLETED"
    variables = _seen(tmp_path)[f"{job}.node0.json"]
    assert variables["SLURM_JOB_PARTITION"] == "low"
    assert variables["SLURM_NTASKS"] == "1"
    assert "SLURM_TEST_LEFT_OVER" not in variables
    assert "TimeLimit=00:05:00" in cluster.run("scontrol", "show", "job", job)


@pytest.mark.usefixtures("cluster")
def test_folders_may_have_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "#1 it's $HOME «"
    folder.mkdir()
    [job] = submit([call_of(calls.leave, folder)], _request(), folder / "jobs")
    assert _end(job).state == "COMPLETED"
    assert list(_seen(folder)) == [f"{job}.node0.json"]
    assert {path.name for path in (folder / "jobs").iterdir()} > {f"{job}_0_log.err", f"{job}_0_log.out"}


@pytest.mark.usefixtures("cluster")
def test_what_the_nodes_have_is_known_before_submission() -> None:
    assert max_array_size() == 1001
    assert (cluster_gpus(None), cores_a_node(None)) == (4, 8)
    assert (cluster_gpus("low,high"), cores_a_node("low")) == (4, 8)
    with pytest.raises(ConfigError) as refused:
        cluster_gpus("nowhere")
    assert str(refused.value) == "hydra.launcher.partition: must be one of high, low, main, got 'nowhere'"


@pytest.mark.parametrize("nodelist", ["127.0.0.[2-3]", "a[1-3,05-07]b[1-2],c", "n[098-101]", "login"])
def test_lists_of_hosts_mean_what_slurm_means(cluster: Cluster, nodelist: str) -> None:
    assert list(hosts(nodelist)) == cluster.run("scontrol", "show", "hostnames", nodelist).split()


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda: states(["1"]), id="states"),
        pytest.param(lambda: find("sweep"), id="find"),
        pytest.param(lambda: cancel(["1_0", "1_1"]), id="cancel"),
        pytest.param(max_array_size, id="max_array_size"),
        pytest.param(lambda: cluster_gpus(None), id="cluster_gpus"),
        pytest.param(lambda: submit([JobCall(("-c", "pass"))], _request(), Path("/nowhere")), id="submit"),
    ],
)
def test_a_controller_that_does_not_answer_says_nothing_about_jobs(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Callable[[], Any]
) -> None:
    settings = re.sub("(?m)^SlurmctldPort=.*", "SlurmctldPort=1", cluster.conf.read_text())
    elsewhere = tmp_path / "slurm.conf"
    elsewhere.write_text(re.sub("(?m)^MessageTimeout=.*", "MessageTimeout=2", settings))
    monkeypatch.setenv("SLURM_CONF", str(elsewhere))
    with pytest.raises(SlurmUnreachableError, match=r"^s\w+: .*Unable to contact slurm controller"):
        ask()
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
