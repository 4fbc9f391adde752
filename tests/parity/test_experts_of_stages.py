"""Experts that ranks share inside of stages, and next to tensor parallelism: neutral, and as predicted."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import replace
from typing import Any

import pytest

from harness.experiment.experiment import Experiment
from harness.predict.prediction import steps_of
from harness.records.measured import StepBytes
from strategies.tracing.balanced_routing import BALANCED
from tests.parity import cases
from tests.rank_pool import RankPool

_MATRIX = [pytest.mark.matrix]
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")
VARIANTS: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {},
    "selective_layer": {"ac_freq": 1},
    "selective_op": {},
    "nested": {},
    "offload": {},
}
ROWS = list(itertools.product(("moe", "hf_olmoe"), ("ep2", "ep2_capacity"), SCHEDULES, VARIANTS))
IN_DEFAULT_RUN = ("moe", "ep2", "1f1b", "full")


def case_of(model: str, mesh: str, schedule: str, variant: str, **fields: Any) -> Experiment:
    """Return a trial of four blocks and four micro-batches on two stages, or four."""
    case = cases.experiment(
        model=model,
        mesh=cases.in_stages(cases.MESHES[mesh], schedule),
        variant=variant,
        options=VARIANTS[variant],
        **{
            "batch_size": 8,
            "sequence_length": 8,
            "microbatches": 4,
            "parity_steps": 1,
            "dropout": 0.1,
            **fields,
        },
    )
    return cases.of_four_blocks(case)


@pytest.mark.parametrize(
    ("model", "mesh", "schedule", "variant"),
    [pytest.param(*row, id=", ".join(row), marks=() if row == IN_DEFAULT_RUN else _MATRIX) for row in ROWS],
)
def test_is_equal_to_the_twin_and_to_the_dense_model(
    pool4: RankPool, model: str, mesh: str, schedule: str, variant: str
) -> None:
    for parity in pool4.run(cases.parity, case_of(model, mesh, schedule, variant)):
        assert not cases.differences(parity)
        (dense,) = parity.chain
        assert (parity.level, dense.level) == ("bitwise", "tolerance")


_PREDICTED = [
    *(("ep2_capacity", schedule, "full") for schedule in SCHEDULES),
    ("ep2_capacity", "1f1b", "selective_op"),
    ("ep2", "zbv", "selective_op"),
    ("ep2", "1f1b", "full"),
]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(("mesh", "schedule", "variant"), _PREDICTED)
def test_bytes_and_collectives_are_those_predicted(
    pool4: RankPool, mesh: str, schedule: str, variant: str
) -> None:
    case = case_of("moe", mesh, schedule, variant)
    found = pool4.run(cases.measured, case)
    for predicted, (memory, work) in zip(steps_of(case), found[::2], strict=True):
        assert work.collectives == predicted.work.collectives
        assert work.collectives_repeated == predicted.work.collectives_repeated
        assert (BALANCED in predicted.assumes) is (mesh == "ep2")
        if mesh == "ep2_capacity":
            assert work.collective_bytes == predicted.work.collective_bytes
            assert work.forward_flops == predicted.work.forward_flops
            for part in dataclasses.fields(StepBytes):
                assert getattr(memory, part.name) == getattr(predicted.memory, part.name)


_NEXT_TO_OTHERS = [
    # model, mesh next to the experts of `ep2` | schedule, where there are stages | variant
    ("moe", {"dp_shard": 1, "cp": 2}, "1f1b", "full"),
    ("moe", {"dp_shard": 1, "cp": 2}, "gpipe", "selective_op"),
    ("moe", {"tp": 2}, "", "full"),
    ("moe", {"tp": 2}, "", "selective_op"),
    ("moe", {"tp": 2}, "", "offload"),
    ("moe", {"tp": 2, "ep_capacity": 0.75}, "", "nested"),
    ("moe", {"tp": 2, "loss_parallel": True}, "", "full"),
    ("hf_olmoe", {"tp": 2}, "", "full"),
    ("hf_mixtral", {"tp": 2}, "", "selective_op"),
    ("hf_qwen3_moe", {"tp": 2, "ep_capacity": 0.75}, "", "nested"),
]


@pytest.mark.parametrize(
    ("model", "mesh", "schedule", "variant"),
    [
        pytest.param(
            *row,
            id=" ".join(map(str, row)),
            marks=() if row == ("moe", {"tp": 2}, "", "full") else _MATRIX,
        )
        for row in _NEXT_TO_OTHERS
    ],
)
def test_other_axes_next_to_experts(
    pool4: RankPool, model: str, mesh: dict[str, Any], schedule: str, variant: str
) -> None:
    shape = replace(cases.MESHES["ep2"], **mesh)
    case = cases.experiment(
        model=model,
        mesh=cases.in_stages(shape, schedule) if schedule else shape,
        variant=variant,
        options=VARIANTS[variant],
        batch_size=8,
        sequence_length=8,
        microbatches=4 if schedule else 1,
        parity_steps=1,
        dropout=0.1,
    )
    for parity in pool4.run(cases.parity, case):
        assert not cases.differences(parity)
        (dense,) = parity.chain
        assert (parity.level, dense.level) == ("bitwise", "tolerance")
