"""Parity of every variant on two gloo ranks: before sharding, after it, in place, and at the call site."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch.multiprocessing.spawn import spawn

from strategies.ac.offload import Offload
from tests.strategies.sharded_ranks import WORLD_SIZE, cases, run
from tests.strategies.toys import toy, train_step

Results = list[dict[str, list[Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Run all cases in one pair of processes and return what each rank wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    spawn(run, (str(folder),), nprocs=WORLD_SIZE)
    return [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(WORLD_SIZE)]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["-".join(case) for case in cases()])
def test_parity_bit_for_bit_on_every_rank(results: Results, case: str) -> None:
    assert [rank[case][0] for rank in results] == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", ["ddp", "fsdp2", "fsdp2_no_reshard", "fsdp1", "fsdp1_flat", "fsdp1_no_shard"]
)
@pytest.mark.parametrize("order", ["inside", "outside", "in_place"])
def test_gathered_weights_are_not_moved(results: Results, mesh: str, order: str) -> None:
    strategy = Offload(layers_fqn="layers")
    model = strategy.apply(toy())
    train_step(model)
    expected = strategy.observe(model).offloaded_bytes
    assert [rank[f"{mesh}-{order}-offload"][1] for rank in results] == [expected, expected]


@pytest.mark.slow
def test_reentrant_inside_a_sharded_fsdp1_unit_is_refused(results: Results) -> None:
    assert results[0]["refused"] == [
        (
            "ac.use_reentrant: 'layers.0' lies inside the sharded FSDP1 unit 'layers.0', whose weights "
            "are freed before recomputation; use ac.use_reentrant=false or wrap_order=outside_fsdp"
        )
    ]
