"""Pipelines: schedules and variants of AC against the twin on the same mesh, and against the dense model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.experiment.experiment import Experiment
from harness.experiment.mesh import Mesh
from tests.parity import cases
from tests.rank_pool import RankPool

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")
VARIANTS = ("none", "full", "selective_layer", "selective_op", "nested", "offload")
FEW = {
    ("1f1b", "none"), ("1f1b", "selective_op"), ("gpipe", "nested"), ("interleaved", "offload"),
    ("zero_bubble", "full"), ("zbv", "nested"),
}  # fmt: skip
"""Cells of the default run: every schedule and most variants once."""


def _case(
    schedule: str, variant: str, *, model: str = "llama", mesh: dict[str, Any] | None = None, **options: Any
) -> Experiment:
    case = cases.experiment(
        model=model,
        mesh=Mesh(**{"pp": 2, "pp_schedule": schedule, **(mesh or {})}),
        variant=variant,
        options={"ac_freq": 1} if variant == "selective_layer" else None,
        batch_size=8,
        sequence_length=8,
        microbatches=4,
        parity_steps=2,
        **options,
    )
    return replace(case, model=replace(case.model, n_layers=4))  # type: ignore[call-arg]  # of transformers


CELLS = [
    pytest.param(
        schedule, variant, id=f"{variant} on {schedule}",
        marks=[] if (schedule, variant) in FEW else [pytest.mark.matrix],
    )
    for schedule in SCHEDULES
    for variant in VARIANTS
    if variant != "selective_op" or schedule not in {"zero_bubble", "zbv"}
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "variant"), CELLS)
def test_is_equal_to_the_twin_with_dropout_and_to_the_dense_model_without(
    pool2: RankPool, schedule: str, variant: str
) -> None:
    case = _case(schedule, variant, dropout=0.1)
    for rank, parity in enumerate(pool2.run(cases.parity, case)):
        assert not cases.differences(parity)
        (dense,) = parity.chain
        assert (parity.level, dense.level, dense.compared.baseline) == (
            "bitwise",
            "bitwise",
            "the dense model",
        )
        has_last = case.mesh.stages - 1 in case.mesh.stages_of(rank)
        assert bool(parity.losses) == bool(dense.losses) == has_last
