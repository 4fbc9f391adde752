"""Each rule of dimension flow, tried on random numbers: chunked execution against the whole."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from strategies.chunk.flow import chunk_rules as rules
from strategies.chunk.flow.grow_region import RegionGrower, seeds_of
from strategies.chunk.loops.loop import make_loop
from strategies.chunk.running.schedule_code import chunk_loop
from strategies.estimate.liveness import Storages
from strategies.tracing.operator_graph import record_scopes
from strategies.tracing.shadow import Shadow, shadowed
from tests.strategies.toys import Function

aten = torch.ops.aten


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape)


def image() -> Tensor:
    return normal(4, 6, 8, 8)


CASES: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Tensor, ...]]]] = {
    "mm": (torch.mm, lambda: (normal(6, 4), normal(4, 8))),
    "addmm": (torch.addmm, lambda: (normal(8), normal(6, 4), normal(4, 8))),
    "addmm with a matrix": (torch.addmm, lambda: (normal(6, 8), normal(6, 4), normal(4, 8))),
    "bmm": (torch.bmm, lambda: (normal(3, 6, 4), normal(3, 4, 8))),
    "baddbmm": (torch.baddbmm, lambda: (normal(1, 6, 8), normal(3, 6, 4), normal(3, 4, 8))),
    "permute": (lambda x: x.permute(2, 0, 1).clone(), lambda: (normal(4, 6, 8),)),
    "transpose": (lambda x: x.transpose(0, 2).clone(), lambda: (normal(4, 6, 8),)),
    "t": (lambda x: x.t().clone(), lambda: (normal(4, 6),)),
    "expand": (lambda x: x.expand(3, 4, 6) * 2, lambda: (normal(4, 1),)),
    "softmax": (lambda x: x.softmax(1), lambda: (normal(4, 6, 8),)),
    "log_softmax": (lambda x: x.log_softmax(-1), lambda: (normal(4, 6, 8),)),
    "safe softmax": (lambda x: aten._safe_softmax.default(x, -1), lambda: (normal(4, 6, 8),)),
    "slice": (lambda x: x[:, 1:3].clone(), lambda: (normal(4, 6, 8),)),
    "cat": (lambda x, y: torch.cat([x, y], 1), lambda: (normal(4, 6, 8), normal(4, 2, 8))),
    "split": (lambda x: [part.clone() for part in x.split(2, 1)], lambda: (normal(4, 6, 8),)),
    "split with sizes": (lambda x: [part.clone() for part in x.split([1, 5], 1)], lambda: (normal(4, 6, 8),)),
    "cumsum": (lambda x: x.cumsum(1), lambda: (normal(4, 6, 8),)),
    "sort": (lambda x: x.sort(-1)[0], lambda: (normal(4, 6, 8),)),
    "topk": (lambda x: x.topk(2)[0], lambda: (normal(4, 6, 8),)),
    "select": (lambda x: x.select(1, 2).clone(), lambda: (normal(4, 6, 8),)),
    "unbind": (lambda x: [part.clone() for part in x.unbind(1)], lambda: (normal(4, 2, 8),)),
    "stack": (lambda x, y: torch.stack([x, y], 1), lambda: (normal(4, 6), normal(4, 6))),
    "sum over dimensions": (lambda x: x.sum((0, 2)), lambda: (normal(4, 6, 8),)),
    "sum kept": (lambda x: x.sum(1, keepdim=True), lambda: (normal(4, 6, 8),)),
    "sum": (torch.sum, lambda: (normal(4, 6),)),
    "mean": (lambda x: x.mean(-1), lambda: (normal(4, 6, 8),)),
    "amax": (lambda x: x.amax(1), lambda: (normal(4, 6, 8),)),
    "amin": (lambda x: x.amin(1, keepdim=True), lambda: (normal(4, 6, 8),)),
    "logsumexp": (lambda x: x.logsumexp(1), lambda: (normal(4, 6, 8),)),
    "variance": (lambda x: x.var(1), lambda: (normal(4, 6, 8),)),
    "variance and mean": (lambda x: torch.var_mean(x, 1), lambda: (normal(4, 6, 8),)),
    "argmax": (lambda x: x.argmax(1), lambda: (normal(4, 6, 8),)),
    "layer norm": (lambda x, w: functional.layer_norm(x, (8,), w), lambda: (normal(4, 6, 8), normal(8))),
    "group norm": (lambda x: functional.group_norm(x, 2), lambda: (image(),)),
    "group norm in half precision": (
        lambda x: functional.group_norm(x, 2),
        lambda: (image().to(torch.bfloat16),),
    ),
    "group norm of joined channels": (
        lambda x, y, w: functional.group_norm(torch.cat((x, y), 1), 4, w, w).relu(),
        lambda: (image(), normal(4, 2, 8, 8), normal(8)),
    ),
    "batch norm": (
        functional.batch_norm,
        lambda: (image(), normal(6), normal(6).abs()),
    ),
    "batch norm in training": (
        lambda x, w: functional.batch_norm(x, None, None, w, training=True),
        lambda: (image(), normal(6)),
    ),
    "batch norm of vectors in training": (
        lambda x, w: functional.batch_norm(x * 2, None, None, w, training=True).relu(),
        lambda: (normal(4, 6), normal(6)),
    ),
    "convolution": (
        lambda x, w, b: functional.conv2d(x, w, b, padding=1),
        lambda: (image(), normal(8, 6, 3, 3), normal(8)),
    ),
    "convolution of single pixels": (functional.conv2d, lambda: (image(), normal(8, 6, 1, 1))),
    "convolution with stride": (
        lambda x, w: functional.conv2d(x, w, stride=2),
        lambda: (image(), normal(8, 6, 2, 2)),
    ),
    "convolution of groups": (
        lambda x, w: functional.conv2d(x, w, groups=2),
        lambda: (image(), normal(8, 3, 3, 3)),
    ),
    "convolution of channels": (
        lambda x, w, b: functional.conv2d(x, w, b, groups=6, padding=1),
        lambda: (image(), normal(6, 1, 3, 3), normal(6)),
    ),
    "convolution of pairs": (
        lambda x, w: functional.conv2d(x.relu(), w, groups=3).relu(),
        lambda: (image(), normal(9, 2, 3, 3)),
    ),
    "transposed convolution": (
        lambda x, w: functional.conv_transpose2d(x, w, stride=2),
        lambda: (image(), normal(6, 8, 2, 2)),
    ),
    "rows of a convolution": (
        lambda x, w, b: functional.conv2d(x.relu(), w, b, padding=1).relu(),
        lambda: (image(), normal(8, 6, 3, 3), normal(8)),
    ),
    "rows of two convolutions": (
        lambda x, v, w: x + functional.conv2d(functional.conv2d(x.relu(), v, padding=1).relu(), w, padding=2),
        lambda: (image(), normal(6, 6, 3, 3), normal(6, 6, 5, 5)),
    ),
    "rows of a shortcut around a convolution": (
        lambda x, v, w: functional.conv2d(y := x.relu(), v) + functional.conv2d(y.sigmoid(), w, padding=1),
        lambda: (image(), normal(6, 6, 1, 1), normal(6, 6, 3, 3)),
    ),
    "every second row of a convolution": (
        lambda x, w: functional.conv2d(x.relu(), w, stride=2, padding=1).relu(),
        lambda: (image(), normal(8, 6, 3, 3)),
    ),
    "every second row of a wide convolution": (
        lambda x, w: functional.conv2d(x.relu(), w, stride=2, padding=3).relu(),
        lambda: (image(), normal(8, 6, 7, 7)),
    ),
    "every second row": (
        lambda x, v, w: functional.conv2d(functional.conv2d(x, v, stride=2), w, padding=1),
        lambda: (image(), normal(6, 6, 1, 1), normal(6, 6, 3, 3)),
    ),
    "rows of a dilated convolution": (
        lambda x, w: functional.conv2d(x.relu(), w, dilation=2, padding=2).relu(),
        lambda: (image(), normal(8, 6, 3, 3)),
    ),
    "rows of a convolution of channels": (
        lambda x, w: functional.conv2d(x.relu(), w, groups=6, padding=1).relu(),
        lambda: (image(), normal(6, 1, 3, 3)),
    ),
    "positions of a convolution": (
        lambda x, w: functional.conv1d(x.relu(), w, padding=1).relu(),
        lambda: (normal(2, 6, 8), normal(4, 6, 3)),
    ),
    "rows of pooling": (
        lambda x, w: functional.conv2d(functional.max_pool2d(x, 3, 2, 1), w, padding=1),
        lambda: (image(), normal(6, 6, 3, 3)),
    ),
    "maxima of one picture": (
        lambda x: functional.max_pool2d(x.relu(), (3, 1), (1, 1), (1, 0)).relu(),
        lambda: (normal(6, 8, 8),),
    ),
    "averages of one picture": (
        lambda x: functional.avg_pool2d(x.relu(), (2, 4), 2, (0, 1)).relu(),
        lambda: (normal(6, 8, 8),),
    ),
    "rows of averages": (
        lambda x, w: functional.avg_pool2d(functional.conv2d(x, w, padding=1), 2),
        lambda: (image(), normal(6, 6, 3, 3)),
    ),
    "rows of a convolution of repeated rows": (
        lambda x, w: functional.conv2d(functional.interpolate(x.relu(), scale_factor=2), w, padding=1),
        lambda: (image(), normal(6, 6, 3, 3)),
    ),
    "embedding": (
        lambda w, i: functional.embedding(i, w),
        lambda: (normal(9, 8), torch.randint(0, 9, (4, 6))),
    ),
    "gather": (lambda x, i: x.gather(1, i), lambda: (normal(4, 6, 8), torch.randint(0, 6, (4, 3, 8)))),
    "rows of nll loss": (
        lambda x, t: functional.nll_loss(x, t, reduction="none"),
        lambda: (normal(6, 8), torch.randint(0, 8, (6,))),
    ),
    "mean of nll loss": (functional.nll_loss, lambda: (normal(6, 8), torch.randint(0, 8, (6,)))),
    "weighted mean of nll loss": (
        lambda x, t, w: functional.nll_loss(x, t, w, ignore_index=-100),
        lambda: (normal(6, 8), torch.tensor([0, 7, -100, 3, 3, -100]), normal(8).abs()),
    ),
    "nll loss of positions": (
        functional.nll_loss,
        lambda: (normal(2, 8, 3, 5), torch.randint(0, 8, (2, 3, 5)), normal(8).abs()),
    ),
    "tril": (torch.tril, lambda: (normal(4, 6, 6),)),
    "triu": (torch.triu, lambda: (normal(4, 6, 6),)),
    "pad": (lambda x: functional.pad(x, (1, 2), value=3.0), lambda: (normal(4, 6, 8),)),
    "nearest": (lambda x: functional.interpolate(x, scale_factor=2), lambda: (image(),)),
    "bilinear": (
        lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"),
        lambda: (image(),),
    ),
    "average pooling": (lambda x: functional.avg_pool2d(x, 2), lambda: (image(),)),
    "maximum pooling": (lambda x: functional.max_pool2d(x, 2), lambda: (image(),)),
    "adaptive pooling": (lambda x: functional.adaptive_avg_pool2d(x, (2, 4)), lambda: (image(),)),
    "attention": (
        functional.scaled_dot_product_attention,
        lambda: (normal(2, 4, 6, 8), normal(2, 4, 10, 8), normal(2, 4, 10, 8)),
    ),
    "causal attention": (
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda: (normal(2, 4, 6, 8), normal(2, 4, 6, 8), normal(2, 4, 6, 8)),
    ),
    "attention with a mask": (
        functional.scaled_dot_product_attention,
        lambda: (normal(2, 4, 6, 8), normal(2, 4, 10, 8), normal(2, 4, 10, 8), normal(1, 1, 6, 10)),
    ),
    "broadcasting": (lambda x, y: x * y + 1, lambda: (normal(4, 6, 8), normal(6, 1))),
    "where": (lambda x, y: torch.where(x > 0, x, y), lambda: (normal(4, 6), normal(6))),
    "masked fill": (lambda x: x.masked_fill(x > 0, 2.0), lambda: (normal(4, 6),)),
    "cast": (lambda x: x.to(torch.float64), lambda: (normal(4, 6),)),
    "heads merged": (
        lambda x: x.transpose(1, 2).reshape(2, 6, 32) * 2,
        lambda: (normal(2, 4, 6, 8),),
    ),
    "heads split": (lambda x: x.view(2, 6, 4, 8).transpose(1, 2) * 2, lambda: (normal(2, 6, 32),)),
    "rows merged": (lambda x, w: (x.view(12, 8) @ w).view(2, 6, 4), lambda: (normal(2, 6, 8), normal(8, 4))),
    "rows of a batch": (
        lambda x, w, y: ((x.view(12, 8) @ w).view(2, 6, 4).softmax(-1) + y).view(12, 4) * 2,
        lambda: (normal(2, 6, 8), normal(8, 4), normal(2, 6, 1)),
    ),
    "rows of a batch with places": (
        lambda x, w, y: ((x.view(12, 8) @ w).view(2, 6, 4) + y).view(12, 4) * 2,
        lambda: (normal(2, 6, 8), normal(8, 4), normal(6, 4)),
    ),
    "rows of a batch, turned": (
        lambda x, w: (x.view(12, 8) @ w).view(2, 6, 4).transpose(0, 1).reshape(12, 4) * 2,
        lambda: (normal(2, 6, 8), normal(8, 4)),
    ),
    "embedding of a batch": (
        lambda w, i: functional.embedding(i, w).view(24, 8) * 2,
        lambda: (normal(9, 8), torch.randint(0, 9, (4, 6))),
    ),
    "all but the first rows": (
        lambda x, w: (x.view(12, 8) @ w).view(2, 6, 4)[:, 1:].reshape(10, 4).log_softmax(-1),
        lambda: (normal(2, 6, 8), normal(8, 4)),
    ),
    "all but the last pairs": (
        lambda x: (x.view(6, 2, 4) * 2).view(12, 4)[:-2].view(5, 2, 4) * 2,
        lambda: (normal(12, 4),),
    ),
    "one of a batch without its dimension": (
        lambda x: (x.view(2, 6, 1, 4) * 2).squeeze(2).view(12, 4).squeeze() * 2,
        lambda: (normal(12, 4),),
    ),
    "a new dimension": (lambda x: x.unsqueeze(1) * x.unsqueeze(0), lambda: (normal(4, 6),)),
    "ones": (lambda x: x + torch.ones(6, 8), lambda: (normal(4, 6, 8),)),
}

ELSEWHERE = {
    aten._fused_rms_norm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten.linalg_vector_norm.default,
}
"""Kernels of CUDA, and an operator that is known not to be chunked."""


def graph_of(name: str, *, has_gradients: bool = False) -> tuple[fx.Graph, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    function, sample = CASES[name]
    inputs = tuple(each.requires_grad_(has_gradients) for each in sample())
    shadow = Shadow.of(Function(function)).on(torch.device("cpu"))
    with torch.set_grad_enabled(has_gradients):
        (scope,) = record_scopes(shadow, frozenset(), *shadowed(shadow, (inputs, {}), torch.device("cpu")))
    return scope.graph, inputs


def values(graph: fx.Graph, inputs: tuple[Tensor, ...]) -> dict[fx.Node, Any]:
    """Return what each node of the graph gives on real tensors."""
    waiting, known = iter(inputs), dict[fx.Node, Any]()
    for node in graph.nodes:
        if node.op == "placeholder":
            known[node] = next(waiting)
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = node.target(*args, **kwargs)
    return known


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", [1, 2, 5])
def test_chunks_give_what_the_whole_gives(name: str, length: int) -> None:
    graph, inputs = graph_of(name)
    expected = values(graph, inputs)
    window = [node for node in graph.nodes if node.op == "call_function"]
    everything = {node for node in window if isinstance(node.meta["val"], Tensor)}
    ends = {node for node in everything if node.next.op == "output"}
    tried = 0
    seeds = [seed for node in window for seed in seeds_of(node)]
    for seed, outside in product(seeds, (everything, ends)):
        region = RegionGrower(window, lambda _: True).region(seed)
        loop = make_loop(region, outside, 1, Storages.of_graph(graph)) if region else None
        if loop is None:
            continue
        module = chunk_loop(loop.with_length(min(length, loop.size)), is_unread=False)
        results = tree_leaves(module(*(expected[loop_input.node] for loop_input in loop.inputs)))
        for loop_output, result in zip(loop.outputs, results, strict=True):
            torch.testing.assert_close(
                result, expected[loop_output.node], rtol=1e-5, atol=1e-5, equal_nan=True
            )
            assert result.dtype is expected[loop_output.node].dtype
        tried += 1
    assert tried > 0


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("rows of a c", "every second"))])
@pytest.mark.parametrize("length", [1, 3])
def test_gradients_of_overlapping_chunks_are_those_of_the_whole(name: str, length: int) -> None:
    graph, inputs = graph_of(name, has_gradients=True)
    window = [node for node in graph.nodes if node.op == "call_function"]
    last = window[-1]
    expected = torch.autograd.grad(values(graph, inputs)[last].square().sum(), inputs)
    seed = next(seed for seed in seeds_of(last) if seed.way == ("dim", 2))
    region = RegionGrower(window, lambda _: False).region(seed)
    assert region is not None
    assert region.members == window
    loop = make_loop(region, {last}, length, Storages.of_graph(graph))
    assert loop is not None
    assert any(operand.axis is not None and operand.axis.has_halo for operand in loop.inputs)
    known = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
    module = chunk_loop(loop, is_unread=False)
    result = module(*(known[operand.node] for operand in loop.inputs))
    for found, gradient in zip(torch.autograd.grad(result.square().sum(), inputs), expected, strict=True):
        assert (found - gradient).abs().max() <= 5e-6 * gradient.abs().max()


def test_every_rule_is_tried() -> None:
    used = {node.target for name in CASES for node in graph_of(name)[0].nodes if node.op == "call_function"}
    assert set(rules._RULES) - used - ELSEWHERE == set()


@pytest.mark.parametrize(
    ("function", "sample"),
    [
        pytest.param(lambda x: x.roll(1, 0), lambda: (normal(6, 8),), id="an operator without a rule"),
        pytest.param(lambda x: x.cumsum(0), lambda: (normal(6),), id="along the dimension itself"),
        pytest.param(functional.dropout, lambda: (normal(6, 8),), id="random numbers"),
    ],
)
def test_what_cannot_be_chunked_has_no_region(
    function: Callable[..., Any], sample: Callable[[], tuple[Tensor, ...]]
) -> None:
    CASES["here"] = function, sample
    graph, _ = graph_of("here")
    del CASES["here"]
    first = next(node for node in graph.nodes if node.op == "call_function" and not rules.rules_of(node))
    assert all(RegionGrower([first], lambda _: True).region(seed) is None for seed in seeds_of(first))
