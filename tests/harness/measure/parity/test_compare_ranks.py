"""Parity on several ranks: every rank compares its own shard, and says which rank differs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from harness.measure.parity.compare import compare_steps
from harness.measure.parity.snapshot import Captured
from harness.records.parity_result import FirstDifference, Parity
from tests.rank_pool import RankPool
from tests.toy_trainee import ToyTrainee, toy_steps, toy_trainee

STEPS = 2


class Blocks(nn.Module):
    """Two blocks of two linear layers with dropout, each a region when asked."""

    def __init__(self, *, is_checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8)) for _ in range(2)
        )
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("calls").add_(1)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
        return x


def build(kind: str, *, is_checkpointed: bool) -> nn.Module:
    model: nn.Module = Blocks(is_checkpointed=is_checkpointed)
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    mesh = init_device_mesh("cpu", (2,))
    if kind == "tp":
        plan = {"layers.*.0": ColwiseParallel(), "layers.*.2": RowwiseParallel()}
        return parallelize_module(model, mesh, plan)
    for layer in model.get_submodule("layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class Corrupted(ToyTrainee):
    """A trainee whose first gradient is doubled after backward."""

    def backward(self, loss: Tensor) -> None:
        ToyTrainee.backward(self, loss)
        grad = next(parameter.grad for parameter in self.model.parameters() if parameter.grad is not None)
        (grad.to_local() if isinstance(grad, DTensor) else grad).mul_(2)


def compare_on(rank: int, kind: str, corrupted_rank: int | None) -> Parity:
    plain, region = (
        toy_trainee(partial(build, kind, is_checkpointed=is_checkpointed))
        for is_checkpointed in (False, True)
    )
    if rank == corrupted_rank:
        region = Corrupted(model=region.model, optimizer=region.optimizer, call=region.call)
    dp_rank = 0 if kind == "tp" else rank
    expected, actual = (toy_steps(trainee, count=STEPS, dp_rank=dp_rank) for trainee in (plain, region))
    return compare_steps(expected, actual, count=STEPS, rank=rank)


def captured(rank: int, dim: int) -> list[tuple[str, bool]]:
    whole = torch.arange(12.0).reshape(4, 3)
    sharded = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(dim)])
    part = whole.chunk(2, dim)[rank]
    return [
        (str(each), torch.equal(each.value, expected))
        for each, expected in ((Captured.of(sharded), part), (Captured.of(sharded, whole=True), whole))
    ]


def test_a_dtensor_is_captured_by_shards_or_as_a_whole(pool2: RankPool) -> None:
    shard = "DTensor (Shard(dim=0),) of (4, 3) float32 (2, 3) on cpu"
    assert pool2.run(captured, 0) == [[(shard, True), ("Tensor float32 (4, 3) on cpu", True)]] * 2


KINDS = ["ddp", "fsdp1", "fsdp2", "tp"]


@pytest.mark.parametrize("kind", KINDS)
def test_recomputation_is_neutral_on_every_rank(pool2: RankPool, kind: str) -> None:
    found = pool2.run(compare_on, kind, None)
    assert [parity.is_equal for parity in found] == [True, True]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("ddp", "module.layers.0.0.weight"),
        ("fsdp1", None),
        ("fsdp2", "layers.0.0.weight"),
        ("tp", "layers.0.0.weight"),
    ],
)
def test_the_rank_that_differs_is_named(pool2: RankPool, kind: str, name: str | None) -> None:
    innocent, guilty = pool2.run(compare_on, kind, 1)
    first: Any = guilty.gradients.first_difference
    assert isinstance(first, FirstDifference)
    assert (first.rank, first.step) == (1, 0)
    assert name is None or first.name == name
    # only what ranks exchange in the next step carries it over
    assert innocent.gradients.first_difference is None or innocent.gradients.first_difference.step == 1
