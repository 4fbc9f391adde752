"""FLOPs, recomputed operators, forward calls and collectives of one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from harness.measure.step import instrument
from harness.models.base import Batch
from harness.records.measured import MeasuredWork
from strategies.estimate.collectives import collective_name, payload_bytes
from strategies.estimate.flops import flops_of
from tests.harness.measure.metered import Metered, tokens, transformer, warmed
from tests.rank_pool import RankPool

TOKENS, WIDTH = 2 * 16, 32
LINEARS = 2 * TOKENS * WIDTH * (3 * WIDTH + WIDTH + 2 * WIDTH + 2 * WIDTH)
DOWN = 2 * TOKENS * WIDTH * 2 * WIDTH
ATTENTION = 2 * 2 * TOKENS * 16 * WIDTH
HEAD = 2 * TOKENS * WIDTH * 64
FORWARD = 2 * (LINEARS + ATTENTION) + HEAD
# the flash kernel computes the scores once more
BACKWARD = 2 * FORWARD + 2 * ATTENTION // 2


@pytest.mark.parametrize(
    ("region", "recomputed", "calls"),
    [
        pytest.param("none", 0, 1, id="none recomputes nothing"),
        pytest.param("full", 2 * (LINEARS + ATTENTION - DOWN), 2, id="full stops before the last linear"),
        pytest.param("full to the end", 2 * (LINEARS + ATTENTION), 2, id="full without early stop"),
        pytest.param("reentrant", 2 * (LINEARS + ATTENTION), 2, id="reentrant recomputes all"),
        pytest.param("selective", 2 * ATTENTION, 2, id="selective recomputes what it does not save"),
    ],
)
def test_flops_and_calls(region: str, recomputed: int, calls: int) -> None:
    work = instrument(transformer(region), tokens()).work
    assert (work.forward_flops, work.backward_flops, work.recomputed_flops) == (
        FORWARD,
        BACKWARD + recomputed,
        recomputed,
    )
    assert work.calls == {"layers.0": calls, "layers.1": calls}
    assert work.backward_flops - work.recomputed_flops - work.kernel_recomputed_flops == 2 * FORWARD


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_with_a_causal_mask_is_told_apart(is_causal: bool) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            query, key, value = self.qkv(x).chunk(3, dim=-1)
            return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)

    batch = Batch(inputs=(torch.randn(2, 1, 4, 8),), targets=None)
    work = instrument(warmed(Metered(Attention()), batch), batch).work
    square = 4 * 2 * 4 * 4 * 8
    assert work.causal_attention_flops == (square + 5 * square // 2 if is_causal else 0)
    assert work.kernel_recomputed_flops == square // 2


def test_what_nobody_counts_is_named_with_its_share_of_the_step() -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            values: Tensor = torch.linalg.svdvals(y) + torch.linalg.svdvals(y.mT)
            return values

    batch = Batch(inputs=(torch.randn(2, 8, 8),), targets=None)
    work = instrument(warmed(Metered(Spectral()), batch), batch).work
    (name,) = work.uncounted_ops
    assert (name, work.uncounted_ops[name].count) == ("aten._linalg_svd.default", 2)
    assert 0 < work.uncounted_ops[name].seconds_share < 1
    assert instrument(transformer("none"), tokens()).work.uncounted_ops == {}


WITHOUT_PRODUCTS: Mapping[str, tuple[Callable[[], nn.Module], bool]] = {
    "a chain of elementwise operators": (lambda: Applied(lambda x: x.sin().exp().cos() * x), False),
    "index_add": (lambda: Applied(lambda x: x.index_add(1, torch.arange(6), x.sin()).cos()), False),
    "scatter": (
        lambda: Applied(lambda x: x.scatter_add(1, torch.arange(8).expand(4, 6, 8) % 6, x).cos()),
        False,
    ),
    "a transform": (lambda: Applied(lambda x: torch.fft.rfft(x).abs()), True),
    "cells": (lambda: Recurrent(nn.LSTMCell(8, 8)), True),
    "an LSTM": (lambda: Recurrent(nn.LSTM(8, 8)), True),
    "singular values": (lambda: Applied(torch.linalg.svdvals), False),
}


class Applied(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.scale)


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.layer, nn.LSTM):
            return torch.sin(self.layer(x)[0])
        hidden = None
        for each in x.unbind(0):
            hidden = self.layer(each, hidden)
        assert hidden is not None
        return torch.sin(hidden[0])


class Again(nn.Module):
    """A module that backward runs again as a whole."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.inner, x, use_reentrant=False, early_stop=False)
        return output


@pytest.mark.parametrize(("make", "has_flops"), WITHOUT_PRODUCTS.values(), ids=WITHOUT_PRODUCTS)
def test_what_runs_again_takes_seconds_with_flops_or_without(
    make: Callable[[], nn.Module], has_flops: bool
) -> None:
    batch = Batch(inputs=(torch.randn(4, 6, 8),), targets=None)
    plain, again = (
        instrument(warmed(Metered(model), batch), batch).work for model in (make(), Again(make()))
    )
    assert (plain.recomputed_ops, plain.recomputed_seconds_share) == ({}, 0.0)
    assert bool(again.recomputed_flops) is has_flops
    assert 0.1 < again.recomputed_seconds_share < 1
    assert again.beyond(again).recomputed_seconds_share == 0.0


def test_recomputed_operators_are_those_of_forward() -> None:
    recomputed = Counter(instrument(transformer("selective"), tokens()).work.recomputed_ops)
    # what a linear does with the rows of its saved product, in one release of torch or another
    recomputed["aten.view.default"] += recomputed.pop("aten._unsafe_view.default", 0)
    assert recomputed == {
        "aten._scaled_dot_product_flash_attention_for_cpu.default": 2,
        "aten.add.Tensor": 2,
        "aten.add_.Scalar": 2,
        "aten.arange.start_step": 2,
        "aten.gelu.default": 2,
        "aten.index_select.default": 2,
        "aten.mean.dim": 2,
        "aten.mul.Tensor": 6,
        "aten.permute.default": 2,
        "aten.pow.Tensor_Scalar": 2,
        "aten.rsqrt.default": 2,
        "aten.t.default": 8,
        "aten.topk.default": 2,
        "aten.transpose.int": 2,
        "aten.unbind.int": 2,
        "aten.view.default": 18,
    }


class Nested(nn.Module):
    """Regions in regions around a linear layer, reentrant or not."""

    def __init__(self, depth: int, *, use_reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False)])
        self.depth = depth
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.level(self.depth, x * 1.0)

    def level(self, depth: int, x: Tensor) -> Tensor:
        if depth == 0:
            y: Tensor = self.layers[0](x)
            return y.sin()
        region: Tensor = checkpoint(
            partial(self.level, depth - 1), x, use_reentrant=self.use_reentrant, **self.options
        )
        return region

    @property
    def options(self) -> dict[str, Any]:
        return {} if self.use_reentrant else {"early_stop": False}


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_a_leaf_in_nested_regions_runs_once_more_for_each(depth: int, *, use_reentrant: bool) -> None:
    model = Nested(depth, use_reentrant=use_reentrant)
    batch = Batch(inputs=(torch.ones(4, 8, requires_grad=True),), targets=None)
    work = instrument(warmed(Metered(model), batch), batch).work
    product = 2 * 4 * 8 * 8
    assert work.calls == {"layers.0": 1 + depth}
    assert work.recomputed_flops == depth * product
    assert work.backward_flops == (2 + depth) * product


def test_a_region_class_that_calls_the_plain_forward_is_one_call() -> None:
    class Region(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(super().forward, x, use_reentrant=False, early_stop=False)
            return y

    model = nn.Module()
    model.layers = nn.ModuleList([Region(8, 8)])
    model.forward = lambda x: model.layers[0](x).sin()  # type: ignore[operator, index]
    batch = Batch(inputs=(torch.ones(4, 8),), targets=None)
    assert instrument(warmed(Metered(model), batch), batch).work.calls == {"layers.0": 2}


@pytest.mark.parametrize(
    ("shapes", "forward", "backward"),
    [
        pytest.param(
            [(1, 2, 16, 8)] * 3, 2 * 2 * 2 * 16 * 16 * 8, 5 * 2 * 2 * 16 * 16 * 8, id="self-attention"
        ),
        pytest.param(
            [(1, 4, 16, 8), (1, 2, 32, 8), (1, 2, 32, 8)],
            2 * 2 * 4 * 16 * 32 * 8,
            5 * 2 * 4 * 16 * 32 * 8,
            id="grouped queries over a longer memory",
        ),
    ],
)
def test_flops_of_cpu_attention(shapes: list[tuple[int, ...]], forward: int, backward: int) -> None:
    aten = torch.ops.aten
    q, k, v = (torch.empty(shape, device="meta") for shape in shapes)
    assert flops_of(aten._scaled_dot_product_flash_attention_for_cpu.default, (q, k, v), {}, q) == forward
    assert (
        flops_of(
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default, (q, q, k, v), {}, (q, k, v)
        )
        == backward
    )


@pytest.mark.parametrize(
    ("name", "operands", "flops"),
    [
        pytest.param("addmm_", [(3, 5), (3, 4), (4, 5)], 2 * 3 * 4 * 5, id="a product added in place"),
        pytest.param("baddbmm_", [(2, 3, 5), (2, 3, 4), (2, 4, 5)], 2 * 2 * 3 * 4 * 5, id="a batch of them"),
    ],
)
def test_flops_of_products_in_place(name: str, operands: list[tuple[int, ...]], flops: int) -> None:
    total, left, right = (torch.empty(shape, device="meta") for shape in operands)
    func = getattr(torch.ops.aten, name).default
    assert flops_of(func, (total, left, right), {}, total) == flops


def test_torchs_registry_is_left_alone() -> None:
    added = [op for op, flops in flop_registry.items() if not flops.__module__.startswith("torch.")]
    assert added == []


@pytest.mark.parametrize(
    ("op", "name"),
    [
        pytest.param(
            "_c10d_functional.all_gather_into_tensor.default", "all_gather", id="functional all-gather"
        ),
        pytest.param("_c10d_functional.all_reduce_.default", "all_reduce", id="in-place all-reduce"),
        pytest.param("_c10d_functional.wait_tensor.default", None, id="waiting is no collective"),
        pytest.param(
            "c10d._reduce_scatter_base_.default", "reduce_scatter", id="process group's reduce-scatter"
        ),
        pytest.param("aten.mm.default", None, id="a matmul is none"),
    ],
)
def test_names_of_collectives(op: str, name: str | None) -> None:
    namespace, packet, overload = op.split(".")
    assert collective_name(getattr(getattr(getattr(torch.ops, namespace), packet), overload)) == name


def test_the_payload_is_the_larger_side() -> None:
    shard, whole = torch.empty(4), torch.empty(8)
    assert payload_bytes((whole, shard, object(), 1), None) == 32
    assert payload_bytes(([[shard, shard]], [shard], object()), None) == 32


def _work_on(_: int, kind: str) -> MeasuredWork:
    torch.manual_seed(0)
    trainee = transformer("full")
    model: nn.Module = trainee.model
    layers: Any = model.layers
    if kind == "ddp":
        model = DistributedDataParallel(model)
    if kind == "fsdp":
        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
    if kind == "tp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in layers:
            parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    wrapped = Metered(model, torch.optim.SGD(model.parameters(), lr=0.1))
    wrapped.blocks = trainee.blocks
    batch = tokens()
    return instrument(warmed(warmed(wrapped, batch), batch), batch).work


PARAMETERS = 84224
ROOT = 4 * (64 * 32 + 64 * 32 + 64)


@pytest.mark.parametrize(
    ("kind", "forward", "backward"),
    [
        pytest.param(
            "ddp", {}, {"all_reduce": (1, PARAMETERS)}, id="replicas reduce gradients in one bucket"
        ),
        pytest.param(
            "fsdp",
            {"all_gather": (3, PARAMETERS)},
            # the root unit stays whole between forward and backward
            {"all_gather": (2, PARAMETERS - ROOT), "reduce_scatter": (3, PARAMETERS)},
            id="shards gather twice and scatter once a unit",
        ),
        pytest.param(
            "tp",
            {"all_reduce": (2, 2 * 4096)},
            {"all_reduce": (2, 2 * 4096)},
            id="a row-split linear reduces its result, a column-split one its gradient",
        ),
    ],
)
def test_collectives(
    pool2: RankPool, kind: str, forward: dict[str, tuple[int, int]], backward: dict[str, tuple[int, int]]
) -> None:
    for work in pool2.run(_work_on, kind):
        assert {
            phase: {name: (n, work.collective_bytes[phase][name]) for name, n in counts.items()}
            for phase, counts in work.collectives.items()
        } == {"forward": forward, "backward": backward, "optimizer": {}}
        assert work.calls == {"layers.0": 2, "layers.1": 2}


def test_flops_under_tensor_parallelism_are_local(pool2: RankPool) -> None:
    (work, _), (replicated, _) = pool2.run(_work_on, "tp"), pool2.run(_work_on, "ddp")
    assert replicated.forward_flops - work.forward_flops == 2 * DOWN
