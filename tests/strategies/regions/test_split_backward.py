"""Backward in two parts: what is recomputed, what stays for the weight part, and when it goes."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input
from torch.nn import functional

from bench.peers.split_backward import Block, Measured, Stage, are_equal, is_made, recorder_of, step, variants
from strategies.ac.full import Full
from strategies.ac.nested import Nested
from strategies.ac.selective_op import SelectiveOp
from strategies.base import StrategyError
from strategies.foreign import policy_files
from tests.strategies.users_checkpointing import saves_products

FULL, SELECTIVE = partial(Full, layers_fqn="layers"), partial(SelectiveOp, layers_fqn="layers")
linear = nn.Linear


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = linear(8, 16), linear(16, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))  # type: ignore[no-any-return]


class WeightNorm(nn.Module):
    """Nodes that the weight part alone runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.ones(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        norm = self.weight.norm(dim=1, keepdim=True).exp()
        return torch.tanh(functional.linear(x, self.gain.exp() * self.weight / norm))


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = linear(8, 8), linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(self.left(x))
        return torch.sin(inner) + self.right(inner) * x  # type: ignore[no-any-return]


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.convolution(x.transpose(0, 1)[None]))[0].transpose(0, 1))


class InPlace(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.relu(self.up(x), inplace=True)).mul_(2)  # type: ignore[no-any-return]


class Dropout(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x + self.down(functional.dropout(torch.tanh(self.up(x)), 0.3)), 0.2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = linear(8, 24), linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(1, -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.cells(x)[0]  # type: ignore[no-any-return]


class Far(nn.Module):
    """A parameter at the end of a long chain."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = linear(8, 8), linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.left.weight
        for _ in range(20):
            weight = weight.sin() * 1.01
        return x + self.right(torch.tanh(functional.linear(torch.tanh(x), weight)))  # type: ignore[no-any-return]


class Frozen(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.up.weight.requires_grad_(False)


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        _, y = ctx.saved_tensors
        product: Tensor = gradients[0] * y
        return product


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Exponential.apply(torch.sin(self.inner(torch.tanh(x))) * 0.1)  # type: ignore[no-untyped-call]
        return result


EDGES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    # recomputations that the weight part asks for beyond the first, with `hold`
    "a norm and an MLP": (Residual, 0),
    "a custom function": (Custom, 0),
    "weights that are computed": (WeightNorm, 0),
    "a product with the input": (Product, 0),
    "convolution and batch norm": (Convolution, 0),
    "writes in place": (InPlace, 0),
    "dropout": (Dropout, 0),
    "attention": (Attention, 0),
    "a GRU": (Recurrent, 1),  # its cells share weights: the weight part runs what the input part has run
    "a parameter far away": (Far, 0),
    "a frozen parameter": (Frozen, 0),
}


def stage_of(make: Callable[[], nn.Module]) -> Stage:
    torch.manual_seed(0)
    return Stage([make() for _ in range(3)])


def measured(strategy: Any, make: Callable[[], nn.Module]) -> Measured:
    stage = stage_of(make)
    return step("", (lambda plain: plain) if strategy is None else strategy.apply, stage, torch.randn(5, 8))


@pytest.mark.parametrize("make", [FULL, SELECTIVE], ids=["full", "selective_op"])
@pytest.mark.parametrize("edge", EDGES)
def test_parts_of_a_backward_share_recomputations(edge: str, make: Callable[..., Any]) -> None:
    block, more = EDGES[edge]
    _, plain = measured(None, block)
    for mode, weight_forwards in (("hold", more), ("again", more + 1)):
        found, gradients = measured(make(split_backward=mode), block)
        assert are_equal(gradients, plain), mode
        assert (found.input_forwards, found.weight_forwards) == (1, weight_forwards), mode
        assert found.left_bytes == 0, mode


@pytest.mark.parametrize(
    ("way", "is_split", "forwards", "again", "between_bytes", "peak_bytes"),
    [
        pytest.param("none", True, (0, 0), (0, 0), 2_299_904, 2_365_440, id="nothing recomputed"),
        pytest.param("full, torch", True, (1, 9), (100, 10), 917_504, 9_707_520, id="by torch"),
        pytest.param("full, hold", True, (1, 0), (10, 1), 1_441_792, 1_590_784, id="once"),
        pytest.param("full, again", True, (1, 1), (20, 2), 917_504, 1_264_640, id="once for each part"),
        pytest.param("selective_op, hold", True, (1, 0), (0, 0), 1_507_328, 1_656_320, id="kept"),
        pytest.param("nested, hold", True, (1.5, 0), (16.5, 1.5), 1_409_024, 1_558_016, id="nested"),
        pytest.param("nested, again", True, (1.5, 1.5), (33, 3), 884_736, 1_973_760, id="nested, twice"),
        pytest.param("offload", True, (0, 0), (0, 0), 2_332_672, 2_631_680, id="offloaded"),
        pytest.param("full, torch", False, (1, 0), (10, 1), 0, 1_166_336, id="one backward, by torch"),
        pytest.param("full, hold", False, (1, 0), (10, 1), 0, 1_166_336, id="one backward"),
        pytest.param("full, again", False, (1, 0), (10, 1), 0, 1_166_336, id="one backward, again"),
    ],
)
def test_exact_cost_of_a_stage(
    way: str,
    is_split: bool,
    forwards: tuple[float, float],
    again: tuple[float, float],
    between_bytes: int,
    peak_bytes: int,
) -> None:
    torch.manual_seed(0)
    stage = Stage([Block(64, 0.0) for _ in range(4)])
    found, _ = step(way, variants()[way], stage, torch.randn(2, 32, 64), is_split=is_split)
    assert (found.input_forwards, found.weight_forwards) == forwards
    weights, attentions = again
    assert found.flops == (2 * 13 + weights) * _WEIGHT_FLOPS + (2.5 + attentions) * _ATTENTION_FLOPS
    assert (found.between_bytes, found.peak_bytes, found.left_bytes) == (between_bytes, peak_bytes, 0)


_WEIGHT_FLOPS = 4 * 2 * (2 * 32) * 64**2
"""Of a product with D² weights in each of four blocks, 2·B·S FLOPs a weight.

A block has 13 D² weights; a forward that runs again ends before the last product, with 3 D² of them."""

_ATTENTION_FLOPS = 4 * 2 * 2 * 2 * 32**2 * 64
"""Of the two products of attention in four blocks, 2·B·S²·D each; backward has five."""


def test_selective_checkpoint_of_torch_raises_where_ours_runs() -> None:
    stage = Stage([Block(64, 0.0)])
    with pytest.raises(RuntimeError, match="Trying to backward an extra time"):
        step("", variants()["torch's selective checkpoint"], stage, torch.randn(2, 32, 64))


def test_a_policy_of_torch_is_asked_in_one_recomputation() -> None:
    def under_policy(stage: Stage) -> Stage:
        policy = policy_files.of_function("mine.py", saves_products, "ac.path")
        policy.enclose(dict(stage.layers.named_children()))
        return stage

    _, plain = measured(None, Residual)
    found, gradients = measured(SimpleNamespace(apply=under_policy), Residual)
    assert are_equal(gradients, plain)
    assert (found.input_forwards, found.weight_forwards, found.left_bytes) == (1, 0, 0)


class Twice(Custom):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = ReadsTwice.apply(self.inner(x))  # type: ignore[no-untyped-call]
        return result


class ReadsTwice(Exponential):
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        product: Tensor = gradients[0] * ctx.saved_tensors[1] + 0 * ctx.saved_tensors[0]
        return product


@pytest.mark.parametrize("mode", ["torch", "hold"])
def test_saved_tensors_that_are_read_twice_are_refused_as_by_torch(mode: str) -> None:
    with pytest.raises(RuntimeError, match="already unpacked once"):
        step("", FULL(split_backward=mode).apply, stage_of(Twice), torch.randn(5, 8), is_split=False)


@pytest.mark.parametrize("mode", ["torch", "hold", "again"])
def test_backwards_over_one_graph_recompute_once_each(mode: str) -> None:
    stage = stage_of(Residual)
    FULL(split_backward=mode).apply(stage)
    x = torch.randn(5, 8, requires_grad=True)
    y, forwards = stage(x), stage.counter()
    y.sum().backward(retain_graph=True)
    first = [weight.grad.clone() for weight in stage.parameters()]  # type: ignore[union-attr]
    assert forwards() == 1
    y.sum().backward()
    assert forwards() == 2
    assert all(torch.equal(w.grad, 2 * g) for w, g in zip(stage.parameters(), first, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "strategy", [FULL(), FULL(split_backward="again"), SELECTIVE(), Nested(layers_fqn="layers")]
)
def test_schedule_that_stops_between_the_parts_leaves_nothing(strategy: Any) -> None:
    stage = stage_of(Residual)
    run = strategy.apply(stage)
    gc.collect()
    gc.disable()
    try:
        x = torch.randn(5, 8, requires_grad=True)
        with recorder_of([x, *stage.parameters()]) as recorder:
            y = run(x)
            outputs, groups = stage_backward_input([y], [torch.ones_like(y)], [x], iter(stage.parameters()))
            assert recorder.ledger.total(is_made) > 2 * x.nbytes
            del y, groups, outputs
            assert recorder.ledger.total(is_made) == x.nbytes  # the gradient of x
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("make", "value", "options"),
    [(Full, "twice", "hold, again, torch"), (Nested, "torch", "hold, again")],
    ids=["full", "nested has no form of torch's"],
)
def test_unknown_mode_is_refused(make: Any, value: str, options: str) -> None:
    with pytest.raises(StrategyError) as refused:
        make(layers_fqn="layers", split_backward=value)
    assert str(refused.value) == f"ac.split_backward: must be one of {options}, got {value!r}"


@pytest.mark.slow
def test_example_shows_both() -> None:
    example = Path(__file__).parents[3] / "examples" / "split_backward.py"
    shown = subprocess.run([sys.executable, example], capture_output=True, text=True, check=True).stdout
    assert [line.partition(" forwards")[0] for line in shown.splitlines()[:4]] == [
        "plain: 1",
        "by_torch: 11",
        "once: 2",
        "selective_once: 2",
    ]
    assert shown.count("gradients equal: True") == 4
    assert "selective_by_torch: RuntimeError: Trying to backward an extra time" in shown
