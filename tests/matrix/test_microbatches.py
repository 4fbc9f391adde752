"""Each variant trains on micro-batches as the plain model does, or is refused with its reason."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from harness.errors import ConfigError
from harness.experiment.experiment import Experiment
from harness.experiment.mesh import Mesh
from strategies import eager_variants
from tests.parity import cases
from tests.rank_pool import RankPool

_MESHES = {
    "single": Mesh(),
    "ddp2": Mesh(dp_replicate=2),
    "shard2": Mesh(dp_shard=2),
    "fsdp1": Mesh(dp_shard=2, fsdp="fsdp1"),
    "tp2": Mesh(tp=2),
}
_PLACES = [
    ("single", "each"),
    ("tp2", "each"),
    *product(("ddp2", "shard2", "fsdp1"), ("each", "last")),
]
_UNPLANNED = (
    "mesh.sync: must be each for ac=budget with FSDP, got last: a plan counts no unsharded gradients that "
    "wait for the last micro-batch; or use mesh=ddp2"
)
_ROWS = [*product(eager_variants, _PLACES, ["none"]), *product(["none", "full"], _PLACES[:1], ["minimum"])]


def _case(variant: str, place: tuple[str, str], chunk: str, model: str, microbatches: int) -> Experiment:
    mesh, sync = place
    return cases.experiment(
        variant=variant,
        model=model,
        mesh=replace(_MESHES[mesh], sync=sync),
        chunk=chunk,
        dropout=0.1,
        batch_size=8,
        microbatches=microbatches,
    )


@pytest.mark.matrix
@pytest.mark.parametrize("model", ["llama", "gpt"])
@pytest.mark.parametrize("microbatches", [2, 4])
@pytest.mark.parametrize(
    ("variant", "place", "chunk"),
    [pytest.param(*row, id="-".join([row[0], *row[1], row[2]])) for row in _ROWS],
)
def test_is_bitwise_neutral_or_refused(
    variant: str, place: tuple[str, str], chunk: str, model: str, microbatches: int, pool2: RankPool
) -> None:
    if variant == "budget" and place in {("shard2", "last"), ("fsdp1", "last")}:
        with pytest.raises(ConfigError) as refusal:
            _case(variant, place, chunk, model, microbatches)
        assert str(refusal.value) == _UNPLANNED
        return
    case = _case(variant, place, chunk, model, microbatches)
    found: list[Any] = [cases.prove(0, case)] if place[0] == "single" else pool2.run(cases.prove, case)
    assert found == [[]] * len(found)
