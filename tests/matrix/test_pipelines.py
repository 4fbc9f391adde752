"""Each variant on each schedule, on two ranks, four, and with FSDP: neutral, or refused with its reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from harness.errors import ConfigError
from harness.experiment.experiment import Experiment
from harness.experiment.mesh import Mesh
from tests.parity import cases
from tests.rank_pool import RankPool

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")
VARIANTS = ("none", "full", "selective_layer", "selective_op", "nested", "offload")
MESHES: dict[str, dict[str, Any]] = {
    "pp2": {"pp": 2},
    "pp4": {"pp": 4},
    "shard2_pp2": {"pp": 2, "dp_shard": 2},
}
ROWS = list(product(SCHEDULES, VARIANTS, MESHES, (0.0, 0.1)))
_FREED = (
    "mesh.reshard_after_forward: true does not suit {}: torch looks for the weights of a backward in two "
    "parts among those that FSDP has freed, and loses their gradients; use false, or "
    "mesh.pp_split_backward=false or mesh.pp_schedule=1f1b"
)


def case_of(schedule: str, variant: str, mesh: str, dropout: float, **more: Any) -> Experiment:
    """Return a trial of as many blocks as the schedule has stages on four ranks, or four."""
    sizes = MESHES[mesh]
    blocks = 8 if sizes["pp"] == 4 and schedule not in {"gpipe", "1f1b"} else 4
    case = cases.experiment(
        model="llama",
        mesh=Mesh(pp_schedule=schedule, **sizes, **more),
        variant=variant,
        options={"ac_freq": 1} if variant == "selective_layer" else None,
        batch_size=8,
        sequence_length=8,
        microbatches=4,
        parity_steps=2,
        dropout=dropout,
    )
    return replace(case, model=replace(case.model, n_layers=blocks))  # type: ignore[call-arg]  # of transformers


def refusal_of(schedule: str, variant: str, mesh: str, dropout: float) -> str:
    """Return why a row is refused; empty where it is not."""
    try:
        case_of(schedule, variant, mesh, dropout)
    except ConfigError as error:
        return str(error)
    return ""


def test_what_is_refused_is_refused_by_name() -> None:
    found = Counter(refusal_of(*row) for row in ROWS)
    whole = len(ROWS)
    of_each = len(VARIANTS) * 2
    assert found == {
        "": whole - 2 * of_each,
        _FREED.format("zero_bubble"): of_each,
        _FREED.format("zbv"): of_each,
    }


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("schedule", "variant", "mesh", "dropout"),
    [pytest.param(*row, id=f"{row[1]} on {row[0]}, {row[2]}, dropout {row[3]:g}") for row in ROWS],
)
def test_is_equal_to_the_twin_and_to_the_dense_model(
    pool2: RankPool, pool4: RankPool, schedule: str, variant: str, mesh: str, dropout: float
) -> None:
    is_freed = bool(refusal_of(schedule, variant, mesh, dropout))
    case = case_of(schedule, variant, mesh, dropout, **({"reshard_after_forward": False} if is_freed else {}))
    for parity in (pool2 if mesh == "pp2" else pool4).run(cases.parity, case):
        assert not cases.differences(parity)
        (dense,) = parity.chain
        assert parity.level == "bitwise"
        assert dense.level == ("tolerance" if mesh == "shard2_pp2" else "bitwise")
