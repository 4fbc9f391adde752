"""Each variant on each schedule, on two ranks, four, and with FSDP: neutral, and predicted to the byte."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product
from typing import Any

import pytest

from bench.trials import experiments
from harness.experiment.experiment import Experiment
from harness.experiment.mesh import Mesh
from harness.predict.prediction import predicted_step
from harness.predict.solve import solve
from harness.records.measured import StepBytes, StepFlops
from harness.sweep.predictions import highest_of_ranks
from tests.harness.predict.predicted import hardware
from tests.matrix.facts import SIZES, Run
from tests.parity import cases
from tests.rank_pool import RankPool

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")
VARIANTS = ("none", "full", "selective_layer", "selective_op", "nested", "offload", "budget")
OPTIONS: dict[str, dict[str, Any]] = {"selective_layer": {"ac_freq": 1}, "budget": {"fraction": 0.9}}
MESHES: dict[str, dict[str, Any]] = {
    "pp2": {"pp": 2},
    "pp4": {"pp": 4},
    "shard2_pp2": {"pp": 2, "dp_shard": 2, "reshard_after_forward": False},
}
ROWS = list(product(SCHEDULES, VARIANTS, MESHES, (0.0, 0.1)))


def case_of(schedule: str, variant: str, mesh: str, dropout: float) -> Experiment:
    """Return a trial of as many blocks as the schedule has stages on four ranks, or four."""
    sizes = MESHES[mesh]
    blocks = 8 if sizes["pp"] == 4 and schedule not in {"gpipe", "1f1b"} else 4
    case = cases.experiment(
        model="llama",
        mesh=Mesh(pp_schedule=schedule, **sizes),
        variant=variant,
        options=OPTIONS.get(variant),
        batch_size=8,
        sequence_length=8,
        microbatches=4,
        parity_steps=2,
        dropout=dropout,
    )
    return replace(case, model=replace(case.model, n_layers=blocks))  # type: ignore[call-arg]  # of transformers


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("schedule", "variant", "mesh", "dropout"),
    [
        pytest.param(
            *row,
            id=f"{row[1]} on {row[0]}, {row[2]}, dropout {row[3]:g}",
            marks=[pytest.mark.slow] if row[1] == "budget" else [],
        )
        for row in ROWS
    ],
)
def test_is_equal_to_the_twin_and_to_the_dense_model(
    pool2: RankPool, pool4: RankPool, schedule: str, variant: str, mesh: str, dropout: float
) -> None:
    case = case_of(schedule, variant, mesh, dropout)
    for parity in (pool2 if mesh == "pp2" else pool4).run(cases.parity, case):
        assert not cases.differences(parity)
        (dense,) = parity.chain
        assert parity.level == "bitwise"
        assert dense.level == ("tolerance" if mesh == "shard2_pp2" else "bitwise")


COMPILED = (
    "mesh=pp2 mesh.pp_schedule=1f1b ac=full compile=aot_eager",
    "mesh=pp2 mesh.pp_schedule=zbv ac=nested compile=aot_eager compile_order=compile_first",
    "mesh=shard2_pp2 mesh.pp_schedule=zero_bubble ac=selective_op compile=aot_eager",
    "mesh=pp2 mesh.pp_schedule=interleaved ac=full compile=inductor compile_order=compile_first",
    "mesh=pp2 mesh.pp_schedule=gpipe ac=none compile=inductor",
    "mesh=pp2 mesh.pp_schedule=zbv ac=compiler_budget compile=aot_eager model.dropout=0",
)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("words", COMPILED)
def test_blocks_of_stages_may_be_compiled(run: Run, words: str) -> None:
    sizes = ("model=llama_nano", *SIZES, "model.n_layers=4", "model.dropout=0.1", "batch_size=8")
    (record,) = run(experiments([[*sizes, "microbatches=4", *words.split()]]))
    assert record.parity is not None, record.error
    assert (record.verdict, record.reason) == ("neutral", None)


PREDICTED = (
    # point | fewest ranks of pp that fit where its two do; gpipe has four calls in flight, a whole model one
    ("mesh=pp2 mesh.pp_schedule=1f1b ac=full model.n_layers=4", 2),
    ("mesh=shard2_pp2 mesh.pp_schedule=zero_bubble ac=selective_op model.n_layers=4", 2),
    ("mesh=pp2 mesh.pp_schedule=gpipe ac=budget ac.fraction=0.9 model.n_layers=2", 1),
)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(("words", "fewest"), PREDICTED)
def test_what_a_record_foresees_is_measured_and_solved_for(run: Run, words: str, fewest: int) -> None:
    (case,) = experiments([["model=llama_nano", *SIZES, "batch_size=8", "microbatches=4", *words.split()]])
    foreseen = predicted_step(case)
    (record,) = run([case])
    assert foreseen is not None
    assert record.memory is not None
    assert record.work is not None
    numbers = {each.name: getattr(record.memory, each.name) for each in fields(StepBytes)}
    numbers |= {each.name: getattr(record.work, each.name) for each in fields(StepFlops)}
    assert {name: getattr(foreseen, name) for name in numbers} == numbers
    fitting = hardware(usable_gib=record.memory.peak_bytes / (1 << 30))
    solved, _ = solve(case, "mesh.pp", fitting, highest_of_ranks)
    assert solved.value == fewest
