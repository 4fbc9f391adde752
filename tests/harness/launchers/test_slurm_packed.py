"""Packing an allocation without a Slurm: what a lane needs of it, and how it becomes a step."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from harness.errors import ConfigError
from harness.experiment.mesh import Mesh
from harness.launchers import slurm_client as slurm
from harness.launchers.lane_spec import COMMAND, LaneSpec
from harness.launchers.packing import Need, Slice
from harness.launchers.resource_shape import Resources, Shape
from harness.launchers.slurm_packed import SlurmPacked, _Allocation, _start
from harness.records.claims import new_submission, write_submission
from harness.records.store import Store
from tests.harness.sweeping import AT, task, tasks

ALLOCATION = _Allocation(hosts=(), nodes=2, gpus=4, cores=8)
INSIDE = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_ON_NODE": "8", "SLURM_GPUS_ON_NODE": "4"}


def _shape(nodes: int = 1, ranks: int = 1, device: str = "auto") -> Shape:
    return Shape(nodes=nodes, ranks_per_node=ranks, device=device)


@pytest.mark.parametrize(
    ("shape", "need"),
    [
        pytest.param(_shape(2, 4), Need(nodes=2, gpus=4, cores=8), id="a GPU and two cores a rank"),
        pytest.param(_shape(1, 2, "cpu"), Need(nodes=1, gpus=0, cores=4), id="no GPU on the CPU"),
    ],
)
def test_what_a_lane_needs(shape: Shape, need: Need) -> None:
    assert SlurmPacked(cpus_per_rank=2)._need(shape, ALLOCATION) == need


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        pytest.param(
            _shape(nodes=3), "hydra.launcher.nodes: a trial of shape 3x1 needs 3, got 2", id="more nodes"
        ),
        pytest.param(
            _shape(ranks=5),
            "hydra.launcher.gpus_per_node: a trial of shape 1x5 needs 5, got 4",
            id="more GPUs",
        ),
        pytest.param(
            _shape(ranks=9, device="cpu"),
            "hydra.launcher.cpus_per_node: a trial of shape 1x9 needs 9, got 8",
            id="more cores",
        ),
    ],
)
def test_refuses_a_shape_that_never_fits(shape: Shape, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SlurmPacked()._need(shape, ALLOCATION)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("options", "mesh", "message"),
    [
        pytest.param({}, Mesh(dp_shard=4, device="cpu"), None, id="nothing was said"),
        pytest.param({"cpus_per_node": 4}, Mesh(dp_shard=4, device="cpu"), None, id="it fits"),
        pytest.param({"gpus_per_node": 0}, Mesh(dp_shard=4), None, id="no GPU is asked for"),
        pytest.param(
            {"gpus_per_node": 2},
            Mesh(dp_shard=4),
            "hydra.launcher.gpus_per_node: a trial of shape 1x4 needs 4, got 2",
            id="fewer GPUs",
        ),
        pytest.param(
            {"cpus_per_node": 7, "cpus_per_rank": 2},
            Mesh(dp_shard=4, device="cpu"),
            "hydra.launcher.cpus_per_node: a trial of shape 1x4 needs 8, got 7",
            id="fewer cores",
        ),
        pytest.param(
            {"nodes": 1},
            Mesh(dp_shard=4, nodes=2),
            "hydra.launcher.nodes: a trial of shape 2x2 needs 2, got 1",
            id="fewer nodes",
        ),
    ],
)
def test_refuses_a_mesh_that_is_larger_than_what_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], mesh: Mesh, message: str | None
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert _refusal(SlurmPacked(**options), mesh) == message


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        pytest.param(Mesh(dp_shard=4), None, id="it fits"),
        pytest.param(
            Mesh(dp_shard=4, nodes=4),
            "hydra.launcher.nodes: a trial of shape 4x1 needs 4, got 2",
            id="more nodes than the allocation has",
        ),
    ],
)
def test_inside_an_allocation_its_size_counts(
    monkeypatch: pytest.MonkeyPatch, mesh: Mesh, message: str | None
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for name, value in INSIDE.items():
        monkeypatch.setenv(name, value)
    assert _refusal(SlurmPacked(nodes=4), mesh) == message


def _refusal(launcher: SlurmPacked, mesh: Mesh) -> str | None:
    try:
        launcher.check(mesh)
    except ConfigError as error:
        return str(error)
    return None


def test_what_the_cluster_cannot_hold_is_a_batch_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "cluster_gpus", lambda _partition: 0)
    monkeypatch.setattr(slurm, "cores_a_node", lambda _partition: 2)
    work = [task(0, "mesh=hsdp2x2"), task(1, "mesh=shard2"), task(2), task(3, "mesh=shard4"), task(4)]
    first, *others = SlurmPacked().batches(work)
    assert [each.trial_id for each in first] == [task(number).trial_id for number in (2, 4, 1)]
    assert [[each.trial_id for each in group] for group in others] == [
        [task(number).trial_id for number in (0, 3)]
    ]
    assert SlurmPacked().batches(work[:1]) == [work[:1]]


@pytest.mark.parametrize(
    ("python", "program"),
    [
        pytest.param(None, list(COMMAND), id="this interpreter"),
        pytest.param("env -u X python3", ["env", "-u", "X", "python3", *COMMAND[1:]], id="another one"),
    ],
)
@pytest.mark.parametrize(
    ("gpus", "option"),
    [pytest.param((1, 3), "--gpus-per-node=2", id="GPUs"), pytest.param((), "--gres=none", id="no GPUs")],
)
def test_a_lane_is_a_step_on_its_slice(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: tuple[int, ...],
    option: str,
    python: str | None,
    program: list[str],
) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []

    def popen(command: list[str], *, env: dict[str, str], **_options: Any) -> None:
        started.append((command, env))

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "8")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    store = Store(tmp_path)
    submission = new_submission("slurm_packed", AT)
    write_submission(store, submission)
    spec = LaneSpec(
        name="3",
        launcher="slurm_packed",
        submission=submission.id,
        root=tmp_path,
        sweep="demo",
        tasks=tuple(tasks(1)),
        resources=Resources(core_count=2),
        sys_path=(),
    )
    hosts = ("alpha", "beta")
    _start(python, spec, Slice(gpus=dict.fromkeys(hosts, gpus), cores=dict.fromkeys(hosts, (0, 1))))
    ((command, environment),) = started
    assert command[0] == "srun"
    steps = {"--exact", "--nodes=2", "--ntasks=2", "--nodelist=alpha,beta", "--cpus-per-task=2", option}
    assert steps <= set(command)
    assert command[-len(program) - 1 :] == [*program, str(spec.folder / "lane-3.pickle")]
    assert ("SLURM_CPUS_PER_TASK" in environment, environment["SLURM_JOB_ID"]) == (False, "7")


def test_an_allocation_is_read_from_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in INSIDE.items():
        monkeypatch.setenv(name, value)
    assert _Allocation.here() == _Allocation(hosts=("n1", "n2"), nodes=2, gpus=4, cores=8)
    monkeypatch.delenv("SLURM_GPUS_ON_NODE")
    assert _Allocation.here().gpus == 0
