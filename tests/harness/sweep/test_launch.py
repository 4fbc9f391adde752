"""Sweeps without the command line: what fails becomes a record, what is done is not done again."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.errors import ConfigError
from harness.launchers.run_task import note_of
from harness.launchers.task import Point
from harness.ranks.agent import Agent
from harness.ranks.culprit import Outcome
from harness.ranks.live_ranks import HaltCheck, Watch
from harness.ranks.start import RankJob
from harness.records import files
from harness.records.record import Failure, Record, validate
from harness.records.store import Store
from harness.report.wandb.publisher import Tracker
from harness.sweep.launch import Result, Run, exit_code, run_sweep
from strategies import Tolerance
from strategies.ac.full import Full
from tests.harness import records_fixture
from tests.harness.composing import experiment_of, point_of

Trial = Callable[[str], Record]
Damage = Callable[[pytest.MonkeyPatch, Path], None]

SMALL = (
    "data=synthetic batch_size=2 sequence_length=8 protocol=smoke protocol.timed_pairs=0 "
    "protocol.parity_steps=1"
)
MLP = f"{SMALL} model=mlp model.n_layers=1 model.width=8 model.hidden_width=8"
OFF = Tracker(name="none")
DEADLINE_S = 30
"""Of the trial that hangs; two ranks get there in two seconds, on a busy machine in twenty."""

FAULTS = {
    "raises": ("failed", "ValueError", 1, "instrument", "the width is odd"),
    "runs_out_of_memory": (
        "oom",
        "OutOfMemoryError",
        1,
        "instrument",
        "CUDA out of memory. Tried to allocate 2.00 GiB.",
    ),
    "kills_itself": (
        "failed",
        "SIGKILL",
        1,
        "instrument",
        "rank 1 was killed by SIGKILL; the kernel sends it when memory is exhausted",
    ),
    "segfaults": ("failed", "SIGSEGV", 1, "instrument", "rank 1 was killed by SIGSEGV"),
    "exits": ("failed", "exit 5", 1, "instrument", "rank 1 exited with status 5 and without a result"),
}
"""Factory to status, kind, rank, phase and message."""

LAST = ("runs_out_of_memory_when_made", "hangs", "healthy")


def _point(factory: str) -> Point:
    deadline = f"protocol.deadline_s={DEADLINE_S if factory == 'hangs' else 600}"
    model = f"model=python model.factory=tests.harness.user_models:{factory}"
    return point_of(f"{SMALL} mesh=ddp2 {model} {deadline}")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture(scope="module")
def faulty(root: Path, standing_agent: Agent) -> Trial:
    factories = [*FAULTS, *LAST]
    points = [_point(factory) for factory in factories]
    run = Run(outputs_dir=str(root), name="faults")
    found = run_sweep(points, run, OFF, agent=standing_agent).records
    return dict(zip(factories, found, strict=True)).__getitem__


@pytest.mark.parametrize("factory", FAULTS)
def test_a_fault_becomes_a_record_that_names_its_rank(faulty: Trial, factory: str) -> None:
    record = faulty(factory)
    assert record.error is not None
    found = (record.status, record.error.kind, record.error.rank, record.error.phase, record.error.message)
    assert found == FAULTS[factory]
    assert record.error.log == "rank1.log"
    assert (record.verdict, record.memory, record.work, record.parity, record.time) == (
        "unverified",
        *[None] * 4,
    )


def test_memory_that_runs_out_while_building_is_out_of_memory(faulty: Trial) -> None:
    record = faulty("runs_out_of_memory_when_made")
    assert record.error is not None
    assert (record.status, record.error.kind, record.error.phase) == ("oom", "OutOfMemoryError", "build")


def test_a_rank_that_dies_in_a_schedule_is_named_and_the_others_end(
    tmp_path: Path, standing_agent: Agent
) -> None:
    model = f"model=python model.factory=tests.harness.user_models:kills_itself_in_training {SMALL}"
    point = point_of(f"{model} model.pp_split=[layers] mesh=pp2 mesh.device=cpu batch_size=4 microbatches=4")
    run = Run(outputs_dir=str(tmp_path), name="schedule")
    (record,) = run_sweep([point], run, OFF, agent=standing_agent).records
    assert record.error is not None
    assert (record.status, record.error.kind, record.error.rank, record.error.phase) == (
        "failed", "SIGKILL", 1, "instrument",
    )  # fmt: skip
    assert record.error.log == "rank1.log"


@pytest.mark.matrix
def test_ranks_that_wait_for_one_another_end_with_where_each_is(
    tmp_path: Path, standing_agent: Agent
) -> None:
    model = (
        "model=llama_nano mesh=cp2 mesh.device=cpu ac=python ac.factory=tests.gallery.meshes:asks_once_more"
    )
    point = point_of(f"{model} data=synthetic protocol=smoke protocol.deadline_s=20")
    run = Run(outputs_dir=str(tmp_path), name="order")
    (record,) = run_sweep([point], run, OFF, agent=standing_agent).records
    assert record.error is not None
    assert (record.status, record.error.phase) == ("timeout", "instrument")
    assert re.search(
        r"; every rank waits for others, which more time does not help: "
        r"rank 0 waits in [\w ]+, called by forward \(context_attention.py, line \d+\) of backward; "
        r"rank 1 waits in [\w ]+, called by _one_more \(meshes.py, line \d+\) of backward$",
        record.error.message,
    )


def test_a_rank_that_hangs_is_ended_at_the_deadline_and_named(faulty: Trial) -> None:
    record = faulty("hangs")
    assert record.error is not None
    assert (record.status, record.error.kind, record.error.rank) == ("timeout", "timeout", 1)
    assert record.error.phase == "instrument"
    assert record.error.message.startswith(
        "no result within 30 s; rank 1 is in phase instrument, silent for "
    )


def test_the_sweep_goes_on_after_every_fault(faulty: Trial) -> None:
    assert (faulty("healthy").status, faulty("healthy").verdict) == ("ok", "neutral")


@pytest.mark.parametrize("factory", [*FAULTS, *LAST])
def test_the_record_on_disk_is_the_one_returned(faulty: Trial, root: Path, factory: str) -> None:
    record = faulty(factory)
    path = root / "faults" / record.trial_id / "record.json"
    assert validate(json.loads(path.read_text("utf-8"))) == record


def test_a_log_is_where_the_record_says(faulty: Trial, root: Path) -> None:
    record = faulty("raises")
    assert record.error is not None
    log = root / "faults" / record.trial_id / str(record.error.log)
    assert "ValueError: the width is odd" in log.read_text("utf-8")


def test_duplicates_run_once_and_keep_their_places(tmp_path: Path, standing_agent: Agent) -> None:
    points = [point_of(f"{MLP} {line}") for line in ("ac=full", "ac=none", "ac=full name=other", "seed=-1")]
    found = run_sweep(points, Run(outputs_dir=str(tmp_path)), OFF, agent=standing_agent).records
    assert [record.trial_id for record in found] == [point.trial_id for point in points]
    assert found[0] is found[2]
    assert [record.status for record in found] == ["ok", "ok", "ok", "refused"]
    assert len(list(tmp_path.glob("default/*/record.json"))) == 3


def test_a_refused_point_is_a_record_with_the_reason(tmp_path: Path) -> None:
    points = [point_of("ac=selective_layer ac.ac_freq=0")]
    (record,) = run_sweep(points, Run(outputs_dir=str(tmp_path)), OFF).records
    assert record.error is not None
    assert (record.status, record.verdict) == ("refused", "unverified")
    assert (record.error.kind, record.error.message) == (
        "ConfigError",
        "ac.ac_freq: must be at least 1, got 0",
    )
    assert (record.error.rank, record.error.phase, record.error.log) == (None, None, None)
    assert record.experiment["ac"]["ac_freq"] == 0


def test_what_is_finished_is_not_run_again(
    tmp_path: Path, standing_agent: Agent, capsys: pytest.CaptureFixture[str]
) -> None:
    points = [point_of(f"{MLP} ac=full")]
    (first,) = run_sweep(points, Run(outputs_dir=str(tmp_path)), OFF, agent=standing_agent).records
    path = Store(tmp_path / "default").record_path(first.trial_id)
    written_ns = path.stat().st_mtime_ns
    capsys.readouterr()

    (second,) = run_sweep(points, Run(outputs_dir=str(tmp_path)), OFF, agent=standing_agent).records
    assert second == first
    assert path.stat().st_mtime_ns == written_ns
    assert capsys.readouterr().err == "1 point: 0 to run, 1 done, 0 duplicates\n"

    (third,) = run_sweep(
        points, Run(outputs_dir=str(tmp_path), rerun=True), OFF, agent=standing_agent
    ).records
    assert third.started_at > first.started_at

    changed = dataclasses.replace(third, environment_id="0" * 12)
    Store(tmp_path / "default").write(changed)
    (fourth,) = run_sweep(points, Run(outputs_dir=str(tmp_path)), OFF, agent=standing_agent).records
    assert fourth.started_at > third.started_at


def test_what_failed_runs_again(tmp_path: Path, standing_agent: Agent) -> None:
    points = [point_of(f"{SMALL} model=python model.factory=tests.harness.user_models:exits")]
    run = Run(outputs_dir=str(tmp_path))
    first, second = (run_sweep(points, run, OFF, agent=standing_agent).records[0] for _ in range(2))
    assert (first.status, second.status) == ("failed", "failed")
    assert second.started_at > first.started_at


def test_refuses_a_folder_that_cannot_be_written_before_anything_runs(tmp_path: Path) -> None:
    root = tmp_path / "file"
    root.write_text("")
    with pytest.raises(ConfigError) as caught:
        run_sweep([point_of(MLP)], Run(outputs_dir=str(root)), OFF)
    assert str(caught.value) == f"outputs_dir: cannot write {str(root / 'default')!r}: Not a directory"


@pytest.mark.parametrize(
    ("statuses", "verdicts", "code", "strict_code"),
    [
        pytest.param(["ok"], ["neutral"], 0, 0, id="all is well"),
        pytest.param(["ok"], ["differs"], 0, 1, id="a wrong result is a result"),
        pytest.param(["ok"], ["inert"], 0, 1, id="nothing done is a result"),
        pytest.param(["oom"], ["unverified"], 0, 1, id="out of memory is a result"),
        pytest.param(["refused"], ["unverified"], 0, 1, id="a refusal in a sweep is a result"),
        pytest.param(["failed"], ["unverified"], 1, 1, id="failed"),
        pytest.param(["timeout"], ["unverified"], 1, 1, id="out of time"),
        pytest.param(["lost"], ["unverified"], 1, 1, id="lost"),
        pytest.param(["ok", "failed"], ["neutral", "unverified"], 1, 1, id="one of two failed"),
        pytest.param([], [], 0, 0, id="nothing asked"),
    ],
)
def test_exit_code(statuses: list[str], verdicts: list[str], code: int, strict_code: int) -> None:
    whole = records_fixture.record()
    records = [
        dataclasses.replace(whole, status=status, verdict=verdict)
        for status, verdict in zip(statuses, verdicts, strict=True)
    ]
    result = Result(records=records, missing=0, is_stopped=False)
    assert exit_code(result, strict=False) == code
    assert exit_code(result, strict=True) == strict_code


@pytest.mark.parametrize(
    ("missing", "is_stopped", "code", "strict_code"),
    [
        pytest.param(1, False, 0, 1, id="on its way, as was asked for"),
        pytest.param(1, True, 1, 1, id="not reached when the sweep was stopped"),
    ],
)
def test_exit_code_of_a_sweep_that_is_not_over(
    missing: int, is_stopped: bool, code: int, strict_code: int
) -> None:
    result = Result(records=[records_fixture.record()], missing=missing, is_stopped=is_stopped)
    assert (exit_code(result, strict=False), exit_code(result, strict=True)) == (code, strict_code)


@pytest.mark.parametrize(
    ("baseline", "is_tolerant", "note"),
    [
        pytest.param("paired", False, None, id="nothing to say"),
        pytest.param("none", False, "the twin did not fit", id="no twin"),
        pytest.param("paired", True, "within 1e-06 of the twin: sums in another order", id="a tolerance"),
        pytest.param(
            "none",
            True,
            "the twin did not fit; within 1e-06 of the twin: sums in another order",
            id="no twin and a tolerance",
        ),
    ],
)
def test_the_note_says_how_the_twin_ran_and_why_numbers_may_differ(
    monkeypatch: pytest.MonkeyPatch, baseline: str, is_tolerant: bool, note: str | None
) -> None:
    if is_tolerant:
        monkeypatch.setattr(Full, "tolerance", Tolerance(relative=1e-6, reason="sums in another order"))
    assert note_of(experiment_of("ac=full"), baseline) == note


def test_the_note_says_nothing_of_a_tolerance_that_no_rank_needed() -> None:
    experiment = experiment_of("ac=budget ac.fraction=0.9 chunk=budget")
    assert "within 0.001 of the twin" in (note_of(experiment, "paired", {"tolerance"}) or "")
    assert note_of(experiment, "paired", {"bitwise"}) is None


def test_the_note_says_where_parameters_have_a_tolerance_of_their_own() -> None:
    note = note_of(experiment_of("mesh=tp2 shard=megatron"), "paired")
    assert note == (
        "within 0.001, parameters within 0.01, of the twin (tensors below 1 % of the largest: of that): "
        "ranks add their parts of a sum first, and then these to each other, which rounds otherwise; AdamW "
        "divides gradients by their size, those that are only rounding too; "
        "ac=none chunk=none shard=megatron against ac=none chunk=none shard=none in fp32 within 0.0001 "
        "(tensors below 0.1 % of the largest: of that)"
    )


def test_the_note_says_what_the_twin_was_compared_with() -> None:
    note = note_of(experiment_of("mesh=tp2 shard=megatron ac=full"), "paired")
    assert note == (
        "ac=none chunk=none shard=megatron against ac=none chunk=none shard=none in fp32 within 0.0001 "
        "(tensors below 0.1 % of the largest: of that)"
    )


class _Played(Agent):
    """Runs no rank: every trial fails in the same way."""

    def run(self, job: RankJob, watch: Watch | None = None, halt: HaltCheck | None = None) -> Outcome:
        del watch, halt
        (job.trial_dir / "rank7.json").write_text("{not json")
        return Outcome(status="failed", error=Failure(kind="played", message="no", rank=0, phase="build"))


def _no_space(path: Path, _text: str, **_words: Any) -> None:
    raise OSError(28, "No space left on device", str(path))


def _of_another_user(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Play the system's refusal: these tests may be root's, whom it refuses nothing."""
    opened = os.open

    def refuse(path: str, flags: int, *mode: int, dir_fd: int | None = None) -> int:
        above = None if dir_fd is None else Path(f"/proc/self/fd/{dir_fd}").resolve()
        if str(path) == ".lock" and above == folder.resolve():
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, flags, *mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", refuse)


def _on_a_full_disk(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    written = files.write_atomically

    def write(path: Path, text: str, **words: Any) -> None:
        (_no_space if path == folder / "record.json" else written)(path, text, **words)

    monkeypatch.setattr(files, "write_atomically", write)


def _folder(name: str) -> Damage:
    return lambda _patch, folder: (folder / name).mkdir(parents=True)


def _file(name: str, text: str) -> Damage:
    def damage(_patch: pytest.MonkeyPatch, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / name).write_text(text)

    return damage


def _no_folder(_patch: pytest.MonkeyPatch, folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.touch()


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        pytest.param(_folder("record.json"), "played", id="a folder in the place of the record"),
        pytest.param(_file("record.json", "{"), "played", id="a torn record"),
        pytest.param(_file("claim.json", "[]"), "played", id="a torn claim"),
        pytest.param(_file("rank0.json", "{"), "played", id="a torn report"),
        pytest.param(_folder("rank0.json"), "played", id="a folder in the place of a report"),
        pytest.param(_folder("claim.json"), "IsADirectoryError", id="a folder in the place of the claim"),
        pytest.param(_folder(".lock"), "IsADirectoryError", id="a folder in the place of the lock"),
        pytest.param(_no_folder, "FileExistsError", id="a file in the place of the folder"),
        pytest.param(_of_another_user, "PermissionError", id="a lock of another user"),
        pytest.param(_on_a_full_disk, "OSError", id="a full disk"),
    ],
)
def test_a_folder_that_cannot_be_used_is_that_points_affair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Damage, kind: str
) -> None:
    points = [point_of(f"{MLP} seed={seed}") for seed in range(3)]
    run = Run(outputs_dir=str(tmp_path), name="demo")
    with monkeypatch.context() as patch:
        damage(patch, tmp_path / "demo" / points[1].trial_id)
        records = run_sweep(points, run, OFF, agent=_Played()).records
    found = [record.error.kind for record in records if record.error is not None]
    assert found == ["played", kind, "played"]
    if kind != "played":
        assert records[1].error is not None
        assert records[1].status == "failed"
        assert records[1].error.message.startswith("the folder of the trial cannot be used: [Errno ")
        _repair(tmp_path / "demo" / points[1].trial_id)
        again = run_sweep(points, run, OFF, agent=_Played()).records[1]
        assert again.error is not None
        assert again.error.kind == "played"


def _repair(folder: Path) -> None:
    if folder.is_file():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def test_a_sweep_that_cannot_be_locked_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _of_another_user(monkeypatch, tmp_path / "demo")
    with pytest.raises(ConfigError) as refusal:
        run_sweep([point_of(MLP)], Run(outputs_dir=str(tmp_path), name="demo"), OFF, agent=_Played())
    assert str(refusal.value) == (
        f"outputs_dir: cannot use '{tmp_path}/demo': [Errno 13] Permission denied: '{tmp_path}/demo/.lock'"
    )


def test_the_note_says_where_kernels_that_round_alike_are_equal() -> None:
    note = note_of(experiment_of("compile=inductor ac=full dtype=bf16"), "paired")
    assert note is not None
    exact = "compile=inductor emulate_precision_casts=true"
    assert f"{exact} against ac=none chunk=none shard=none {exact} in bf16 bit for bit; " in note
