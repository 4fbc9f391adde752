"""This machine: how its cores are shared, and whose trials are whose."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

import pytest

from harness.errors import ConfigError
from harness.launchers import local
from harness.launchers.lane_spec import LaneSpec
from harness.launchers.local import Local
from harness.launchers.packing import Need, Slice
from harness.launchers.resource_shape import Resources
from harness.ranks.agent import Agent
from harness.records.claims import DRIVEN, claim, claimant, holding, new_submission, write_submission
from harness.records.store import Store
from tests.harness.composing import experiment_of
from tests.harness.sweeping import AT, sweep_in, task, tasks


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_cores", lambda: list(range(8)))


@pytest.mark.parametrize(
    ("options", "mesh", "need", "cores"),
    [
        pytest.param({}, "single", 8, 8, id="one trial at a time has all cores"),
        pytest.param({"max_parallel": 4}, "single", 2, 2, id="four share them"),
        pytest.param({"max_parallel": 4}, "hsdp2x2", 4, 4, id="at least one a rank"),
        pytest.param({"max_parallel": 16}, "single", 1, 1, id="at least one"),
        pytest.param(
            {"max_parallel": 4, "share_cores": True},
            "hsdp2x2",
            0,
            "2, shared",
            id="shared cores are not taken, and told apart from own ones",
        ),
    ],
)
def test_cores_of_a_trial(options: dict[str, Any], mesh: str, need: int, cores: int | str) -> None:
    experiment = experiment_of(f"model=mlp mesh={mesh}")
    launcher = Local(**options)
    assert launcher._need(experiment.mesh) == Need(nodes=1, gpus=0, cores=need)
    assert launcher.place(experiment.mesh) == {"cpus": cores}


def test_resources() -> None:
    slice_ = Slice(gpus={"localhost": ()}, cores={"localhost": (2, 3)})
    assert Local(max_parallel=4)._resources(slice_) == Resources(core_count=2, cores=(2, 3))
    assert Local(max_parallel=4, share_cores=True)._resources(slice_) == Resources(core_count=2)


def test_refuses_to_run_no_trial_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Local(max_parallel=0)
    assert str(caught.value) == "hydra.launcher.max_parallel: must be at least 1, got 0"


@pytest.mark.parametrize(
    ("launcher", "is_alive", "flying"),
    [
        pytest.param(DRIVEN, True, {0, 1}, id="of a driver that lives"),
        pytest.param(DRIVEN, False, set(), id="of one that died"),
        pytest.param("slurm", True, set(), id="of another launcher"),
    ],
)
def test_claims(tmp_path: Path, launcher: str, is_alive: bool, flying: Collection[int]) -> None:
    store = Store(tmp_path)
    submission = new_submission(launcher, AT)
    write_submission(store, submission)
    claim(store, (each.trial_id for each in tasks(2)), submission.id)
    with holding(store, submission.id):
        if is_alive:
            found = Local().collect(store, "demo", tasks(3)).flights
    if not is_alive:
        found = Local().collect(store, "demo", tasks(3)).flights
    assert {flight.task.trial_id for flight in found} == {task(number).trial_id for number in flying}


def test_a_trial_that_a_later_command_has_taken_over_is_left_to_it(tmp_path: Path) -> None:
    sweep = sweep_in(tmp_path)
    claim(sweep.store, [task().trial_id], "another")
    agent = cast("Agent", None)  # nobody asks it
    job = {"launcher": "local", "submission": "ours"}
    assert local._hold_and_run(sweep, task(), agent, Resources(core_count=1), job) is None
    assert claimant(sweep.store, task().trial_id) == "another"


@pytest.mark.parametrize(
    ("variable", "visible"),
    [
        pytest.param(None, "1,3", id="all devices are visible"),
        pytest.param("4,5,6,7", "5,7", id="the driver sees some"),
    ],
)
def test_a_lane_sees_the_devices_of_its_slice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None, visible: str
) -> None:
    seen: list[str] = []

    def popen(_command: list[str], *, env: dict[str, str], **_options: Any) -> None:
        seen.append(env["CUDA_VISIBLE_DEVICES"])

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", variable)
    store = Store(tmp_path)
    submission = new_submission(DRIVEN, AT)
    write_submission(store, submission)
    spec = LaneSpec(
        name="0",
        launcher="local",
        submission=submission.id,
        root=tmp_path,
        sweep="demo",
        tasks=tuple(tasks(1)),
        resources=Resources(core_count=1),
        sys_path=(),
        driver_pid=os.getpid(),
    )
    local._start(spec, Slice(gpus={"localhost": (1, 3)}, cores={"localhost": (0,)}))
    assert seen == [visible]
