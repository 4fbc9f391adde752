"""`sweep=judge`: next to each point stands the cheapest plan at the peak that it measured."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from harness.command_line.judged import plans_at_peaks
from harness.ranks.forkserver import ForkServer
from harness.records.record import Record
from harness.records.store import Store
from tests.forked_servers import forks_of
from tests.harness import command, records_fixture
from tests.harness.composing import ROOT, composed

BUDGET = OmegaConf.load(ROOT / "conf" / "ac" / "budget.yaml")
ODD = 12_345_679


def measured(peak_bytes: int, host_peak_bytes: int = 0) -> Record:
    record = records_fixture.record()
    assert record.memory is not None
    memory = replace(record.memory, peak_bytes=peak_bytes, host_peak_bytes=host_peak_bytes)
    return replace(record, memory=memory)


def plans(line: str, record: Record) -> list[DictConfig]:
    assert isinstance(BUDGET, DictConfig)
    points = [(composed(line.split()), "one", "it")]
    return [plan for _, plan in plans_at_peaks(points, {"one": record}, BUDGET, pytest.fail)]


@pytest.mark.parametrize("peak_bytes", [1, ODD, 2**30 - 1, 2**30, 3**25, 80 * 2**30 + 1])
def test_a_plan_has_the_bytes_that_were_measured(peak_bytes: int) -> None:
    (plan,) = plans("ac=full", measured(peak_bytes, host_peak_bytes=ODD))
    assert (int(plan.ac.budget_gib * 2**30), int(plan.ac.host_gib * 2**30)) == (peak_bytes, ODD)


@pytest.mark.parametrize(
    ("line", "executor"),
    [
        pytest.param("ac=full", "eager", id="eager"),
        pytest.param("ac=full compile=aot_eager", "compiled", id="compiled"),
    ],
)
def test_a_plan_is_for_the_same_point(line: str, executor: str) -> None:
    (plan,) = plans(f"{line} model=llama_nano batch_size=2", measured(ODD))
    assert (plan.model.name, plan.batch_size, plan.ac.name) == ("llama_nano", 2, "budget")
    assert (plan.ac.layers_fqn, plan.ac.objective, plan.ac.executor) == ("layers", "flops", executor)


def test_a_plan_is_one_that_a_pipeline_takes() -> None:
    line = "ac=full stage_ac=[full,none] mesh=pp2 model=llama_nano microbatches=4"
    (plan,) = plans(line, measured(ODD, host_peak_bytes=ODD))
    assert (plan.ac.name, list(plan.stage_ac), plan.ac.host_gib) == ("budget", [], 0)


@pytest.mark.parametrize("line", ["ac=none", "ac=budget ac.fraction=0.9"])
def test_what_needs_no_plan_next_to_it(line: str) -> None:
    assert plans(line, measured(ODD)) == []


@pytest.mark.parametrize(
    ("line", "records", "reason"),
    [
        pytest.param("ac=full", {}, "it has no record", id="did not run"),
        pytest.param(
            "ac=full",
            {"one": records_fixture.failed("oom")},
            "it ended as oom",
            id="no peak",
        ),
    ],
)
def test_a_plan_that_is_not_made_says_why(line: str, records: dict[str, Record], reason: str) -> None:
    said: list[str] = []
    assert isinstance(BUDGET, DictConfig)
    assert list(plans_at_peaks([(composed(line.split()), "one", "it")], records, BUDGET, said.append)) == []
    assert said == [f"judge: no plan next to it: {reason}"]


def test_a_judged_sweep_ends_in_one_table(rank_server: ForkServer, tmp_path: Path) -> None:
    small = "model=mlp model.n_layers=3 model.width=8 model.hidden_width=64 data=synthetic batch_size=64 "
    words = "-m sweep=judge ac=none,full optimizer=sgd sequence_length=8 mesh.device=cpu tracker=none "
    steps = "protocol=smoke protocol.timed_pairs=0 protocol.parity_steps=1"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    with forks_of(rank_server):
        server = ForkServer(command.PRELOAD)
    try:
        done = command.acbench(server, tmp_path, tuple(f"{small}{words}{steps}".split()), environment)
    finally:
        server.close()
    assert done.code == 0, done.stderr
    records = Store(tmp_path / "outputs" / "judge").scan().records
    found = {str(record.experiment["ac"]["name"]): record for record in records}
    assert found.keys() == {"none", "full", "budget"}
    full, plan = found["full"], found["budget"]
    assert full.memory is not None
    assert plan.memory is not None
    assert full.work is not None
    assert plan.work is not None
    assert plan.verdict == "neutral"
    assert plan.memory.peak_bytes <= full.memory.peak_bytes
    assert plan.work.recomputed_flops <= full.work.recomputed_flops
    assert full.bound is not None
    assert plan.bound is not None
    assert 0 <= plan.bound.points_above <= full.bound.points_above
    rows = [line.partition("  ")[0] for line in done.stdout.splitlines() if "neutral" in line]
    assert rows[:3] == ["none", "full", "budget at full"]
