from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional

from strategies.shard.model.call_states import (
    attention_flops,
    is_random,
    outputs_of,
    sources_of,
    states_of_call,
)
from strategies.shard.model.forward_recording import is_sizes
from strategies.shard.model.placement_state import SUMMED, WHOLE, State, TensorValue
from strategies.tracing.function_graph import FunctionRecorder
from strategies.tracing.shadow import Shadow, shadowed
from tests.strategies.toys import Function

_X = torch.zeros(4, 6, 8)
_HEADS = torch.zeros(4, 2, 6, 8)

FLOWS = [
    # function | inputs | "inputs -> output" of each flow but the whole one
    pytest.param(functional.gelu, [_X], ["R* -> R*", "S0 -> S0", "S1 -> S1", "S2 -> S2"], id="elementwise"),
    pytest.param(
        torch.add, [_X, _X.clone()], ["R* R* -> R*", "S0 S0 -> S0", "S1 S1 -> S1", "S2 S2 -> S2"], id="of two"
    ),
    pytest.param(
        torch.mul,
        [_X, torch.zeros(6, 1)],
        ["R* R* -> R*", "S0 R* -> S0", "S1 S0 -> S1", "S2 R* -> S2"],
        id="broadcast: gradients of what is not cut are summands",
    ),
    pytest.param(
        lambda x: x.transpose(1, -1), [_X], ["R* -> R*", "S0 -> S0", "S2 -> S1", "S1 -> S2"], id="transpose"
    ),
    pytest.param(
        lambda x: x.unflatten(-1, (-1, 2)),
        [_X],
        ["R* -> R*", "S0 -> S0", "S1 -> S1", "S2 -> S2"],
        id="split into heads",
    ),
    pytest.param(
        lambda x: x.flatten(-2), [_X], ["R* -> R*", "S0 -> S0", "S1 -> S1"], id="joined: the outer one"
    ),
    pytest.param(
        lambda x: x.view(2, 2, 48),
        [_X],
        ["R* -> R*", "S0 -> S0", "S1 -> S2"],
        id="view: groups of dimensions",
    ),
    pytest.param(
        lambda x: x.unsqueeze(1), [_X], ["R* -> R*", "S0 -> S0", "S1 -> S2", "S2 -> S3"], id="unsqueeze"
    ),
    pytest.param(
        lambda x: torch.cat((x, x), dim=-1),
        [_X],
        ["R* -> R*", "S0 -> S0", "S1 -> S1"],
        id="cat along another dimension",
    ),
    pytest.param(lambda x: x.chunk(2, dim=-1)[0], [_X], ["R* -> R*", "S0 -> S0", "S1 -> S1"], id="chunk"),
    pytest.param(
        lambda x: x[..., :4], [_X], ["R* -> R*", "S0 -> S0", "S1 -> S1"], id="slice of another dimension"
    ),
    pytest.param(lambda x: x[0, None], [_X], ["R* -> R*", "S1 -> S1", "S2 -> S2"], id="index: what is left"),
    pytest.param(lambda x: x[[0, 1]], [_X], ["R* -> R*"], id="index by numbers: nothing is known"),
    pytest.param(
        lambda x: x[:, None].expand(4, 3, 6, 8),
        [_X],
        ["R* -> R*", "S0 -> S0", "S2 -> S2", "S3 -> S3"],
        id="expand",
    ),
    pytest.param(lambda x: x.mean(-1, keepdim=True), [_X], ["R* -> R*", "S0 -> S0", "S1 -> S1"], id="mean"),
    pytest.param(lambda x: x.sum((0, 1)), [_X], ["R* -> R*", "S2 -> S0"], id="sum"),
    pytest.param(lambda x: x.sum(), [_X], ["R* -> R*"], id="sum of everything"),
    pytest.param(
        lambda x: x.permute(0, 2, 1), [_X], ["R* -> R*", "S0 -> S0", "S2 -> S1", "S1 -> S2"], id="permute"
    ),
    pytest.param(
        torch.matmul,
        [_X, torch.zeros(4, 8, 2)],
        ["R* R* -> R*", "S0 S0 -> S0", "S1 R* -> S1", "R* S2 -> S2"],
        id="product",
    ),
    pytest.param(
        functional.linear,
        [_X, torch.zeros(2, 8)],
        ["R* R* -> R*", "S0 R* -> S0", "S1 R* -> S1"],
        id="linear: rows",
    ),
    pytest.param(
        lambda x: torch.cat((x, x), axis=0),  # type: ignore[call-arg]
        [_X],
        [],
        id="an argument by another name",
    ),
    pytest.param(
        lambda x: x.view(torch.int32), [_X], ["S0 -> S0", "S1 -> S1", "S2 -> S2"], id="another dtype"
    ),
    pytest.param(
        lambda x: (x * 1).relu_(),
        [_X],
        ["S0 -> S0", "S1 -> S1", "S2 -> S2"],
        id="changed in place: no summands",
    ),
    pytest.param(
        lambda q: functional.scaled_dot_product_attention(q, q, q),
        [_HEADS],
        ["R* -> R*", "S0 -> S0", "S1 -> S1"],
        id="attention, by batch or head",
    ),
    pytest.param(
        lambda q: functional.scaled_dot_product_attention(q, q[:, :1], q[:, :1], enable_gqa=True),
        [_HEADS],
        ["R* R* R* -> R*", "S0 S0 S0 -> S0", "S1 R* R* -> S1"],
        id="attention with one key head",
    ),
    pytest.param(lambda x: torch.sort(x)[0], [_X], [], id="what is not listed takes wholes"),
    pytest.param(
        lambda x: (x * 1).index_fill_(0, torch.tensor(0), 1), [_X], [], id="unknown change in place"
    ),
]
SHARDS = [
    # function of tensors whose rules are checked with numbers
    pytest.param(functional.gelu, [_X], id="elementwise"),
    pytest.param(lambda x: 1 - 2 / (x * x + 3) ** 2, [_X], id="elementwise, the last of several"),
    pytest.param(torch.mul, [_X, torch.zeros(6, 1)], id="broadcast"),
    pytest.param(torch.maximum, [_X, torch.zeros(1, 6, 8)], id="broadcast of one"),
    pytest.param(lambda c, x, y: torch.where(c > 0, x, y), [_X, _X.clone(), torch.zeros(8)], id="where"),
    pytest.param(lambda x: x.transpose(1, -1), [_X], id="transpose"),
    pytest.param(lambda x: x.permute((2, 0, 1)), [_X], id="permute"),
    pytest.param(lambda x: x.permute(dims=(1, -1, 0)), [_X], id="permute by name"),
    pytest.param(lambda x: x.unsqueeze(-2), [_X], id="unsqueeze"),
    pytest.param(lambda x: x.unflatten(-1, (-1, 2)), [_X], id="unflatten"),
    pytest.param(lambda x: x.flatten(1), [_X], id="flatten"),
    pytest.param(lambda x: x.reshape(-1, x.shape[-1]), [_X], id="reshape of rows"),
    pytest.param(lambda x: x.reshape(1, -1, *x.shape[1:], 1), [_X], id="reshape with dimensions of one"),
    pytest.param(lambda x: x.transpose(0, 1).reshape(-1, x.shape[-1]), [_X], id="reshape of a transpose"),
    pytest.param(lambda x, y: x.view_as(y), [_X, torch.zeros(4, 3, 2, 8)], id="view as another"),
    pytest.param(lambda x: torch.cat((x, x.sin()), dim=-2), [_X], id="cat"),
    pytest.param(lambda x: torch.stack((x, x.sin()), dim=1), [_X], id="stack"),
    pytest.param(lambda x: x.chunk(2, dim=1)[1], [_X], id="chunk"),
    pytest.param(lambda x: x.split([2, 4], dim=1)[1], [_X], id="split"),
    pytest.param(lambda x: x.unbind(1)[2], [_X], id="unbind"),
    pytest.param(lambda x: x[:, 1, None, ::2], [_X], id="index"),
    pytest.param(lambda x: x[..., None, 3:], [_X], id="index with dots"),
    pytest.param(lambda x: x[:, None].expand(-1, 3, -1, -1), [_X], id="expand"),
    pytest.param(lambda x: x.mean((-1, 0)), [_X], id="mean"),
    pytest.param(lambda x: x.sum(1, keepdim=True), [_X], id="sum"),
    pytest.param(lambda x: x.amax(1), [_X], id="largest"),
    pytest.param(lambda x: x.softmax(-1), [_X], id="softmax"),
    pytest.param(lambda x: functional.log_softmax(x, dim=0), [_X], id="log_softmax"),
    pytest.param(torch.matmul, [_X, torch.zeros(8, 4)], id="product with a matrix"),
    pytest.param(torch.matmul, [torch.zeros(2, 1, 6, 8), torch.zeros(2, 8, 4)], id="product of batches"),
    pytest.param(
        torch.matmul, [torch.zeros(2, 6), torch.zeros(4, 6, 2)], id="product of a matrix with a batch"
    ),
    pytest.param(functional.linear, [_X, torch.zeros(2, 8), torch.zeros(2)], id="linear"),
    pytest.param(
        lambda x, w, b: functional.layer_norm(x, w.shape, w, b),
        [_X, torch.zeros(8), torch.zeros(8)],
        id="norm",
    ),
    pytest.param(lambda x, w: functional.rms_norm(x, x.shape[-1:], w), [_X, torch.zeros(8)], id="RMS norm"),
    pytest.param(
        lambda q, k: functional.scaled_dot_product_attention(q, k, k, is_causal=True),
        [_HEADS, _HEADS.clone()],
        id="attention",
    ),
    pytest.param(
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        [torch.zeros(4, 8, 6, 8), _HEADS, _HEADS.clone()],
        id="attention with grouped heads",
    ),
    pytest.param(
        lambda q, m: functional.scaled_dot_product_attention(q, q, q, m),
        [_HEADS, torch.zeros(2, 6, 6)],
        id="mask",
    ),
]
INDIVISIBLE = [
    pytest.param((3, 6, 8), ["R* -> R*", "S1 -> S1", "S2 -> S2"], id="batch"),
    pytest.param((3, 5, 7), ["R* -> R*"], id="everything"),
]


def _graph(function: Callable[..., Tensor], inputs: list[Tensor]) -> fx.Graph:
    shadow = Shadow.of(Function(function)).on(torch.device("cpu"))
    fakes = tuple(fake.requires_grad_() for fake in shadowed(shadow, tuple(inputs), torch.device("cpu")))
    return FunctionRecorder(shadow, frozenset(), "the function").record(fakes)


def _last(function: Callable[..., Tensor], inputs: list[Tensor]) -> fx.Node:
    graph = _graph(function, inputs)
    (output,) = (node for node in graph.nodes if node.op == "output")
    (last,) = output.all_input_nodes
    assert isinstance(last, fx.Node)
    source = last.args[0]
    if isinstance(source, fx.Node) and not isinstance(source.meta["val"], Tensor):
        return source  # of the parts that it picks from
    return last


def _inputs(node: fx.Node) -> list[TensorValue]:
    return [
        TensorValue.of(value) if isinstance(value := source.meta["val"], Tensor) else outputs_of(node)[0]
        for source in sources_of(node)
    ]


def _texts(node: fx.Node) -> list[str]:
    found = states_of_call(node, _inputs(node), 2)
    assert {str(state) for state in (*found[0].inputs, found[0].output)} == {"R"}
    return [f"{' '.join(map(str, flow.inputs))} -> {flow.output}" for flow in found[1:]]


@pytest.mark.parametrize(("function", "inputs", "expected"), FLOWS)
def test_states_that_fit_together(function: Any, inputs: list[Tensor], expected: list[str]) -> None:
    assert _texts(_last(function, inputs)) == expected


@pytest.mark.parametrize(("function", "inputs"), SHARDS)
def test_ranks_compute_their_parts(function: Any, inputs: list[Tensor]) -> None:
    """The states of a flow, whatever is between inputs and result, are those of these tensors."""
    generator = torch.Generator().manual_seed(0)
    wholes = [torch.randn(each.shape, dtype=torch.float64, generator=generator) for each in inputs]
    expected = [each.clone().requires_grad_() for each in wholes]
    output = function(*expected)
    back = torch.randn(output.shape, dtype=torch.float64, generator=generator)
    output.backward(back)
    found = _flows(function, inputs)
    assert found
    for states, state in found:
        gradients: list[list[Tensor | None]] = []
        for rank in range(2):
            parts = [_part(each, its, rank) for each, its in zip(wholes, states, strict=True)]
            part = function(*parts)
            torch.testing.assert_close(part, _part(output, state, rank), rtol=0, atol=1e-12)
            part.backward(_part(back, state, rank) * (rank if state == SUMMED else 1))
            gradients.append([each.grad for each in parts])
        for whole, its, of_ranks in zip(expected, states, zip(*gradients, strict=True), strict=True):
            assert whole.grad is not None or of_ranks == (None, None)
            if whole.grad is not None:
                dim = its.dim
                made = sum(of_ranks) if dim is None else torch.cat(of_ranks, dim)
                torch.testing.assert_close(made, whole.grad, rtol=0, atol=1e-12)


def _part(whole: Tensor, state: State, rank: int) -> Tensor:
    part = whole.detach() if state.dim is None else whole.detach().chunk(2, state.dim)[rank]
    return part.clone().requires_grad_()


def _flows(function: Any, inputs: list[Tensor]) -> list[tuple[list[State], State]]:
    """Return all states of inputs and output, but the whole ones, that the functions in between allow."""
    found: list[dict[fx.Node, State]] = [{}]
    graph = _graph(function, inputs)
    output = next(node for node in graph.nodes if node.op == "output").all_input_nodes[0]
    for node in graph.nodes:
        if node.op in ("call_function", "call_method") and not is_sizes(node):
            found = [
                {**before, **dict(zip(sources_of(node), flow.inputs, strict=True)), node: flow.output}
                for before in found
                for flow in states_of_call(node, _inputs(node), 2)
                if all(
                    before.get(source, state) == state
                    for source, state in zip(sources_of(node), flow.inputs, strict=True)
                )
            ]
    places = [node for node in graph.nodes if node.op == "placeholder"]
    return [
        ([states.get(place, WHOLE) for place in places], states[output])
        for states in found
        if states[output] != WHOLE
    ]


@pytest.mark.parametrize(("shape", "expected"), INDIVISIBLE)
def test_what_cannot_be_cut_evenly_is_not_cut(shape: tuple[int, ...], expected: list[str]) -> None:
    assert _texts(_last(functional.relu, [torch.zeros(shape)])) == expected


@pytest.mark.parametrize(
    ("function", "random"),
    [
        pytest.param(lambda x: functional.dropout(x, 0.1), True, id="dropout"),
        pytest.param(lambda x: functional.dropout(x, 0.0), False, id="dropout of nothing"),
        pytest.param(lambda x: functional.dropout(x, 0.1, training=False), False, id="dropout, not training"),
        pytest.param(
            lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1),
            True,
            id="attention with dropout",
        ),
        pytest.param(lambda x: functional.scaled_dot_product_attention(x, x, x), False, id="attention"),
    ],
)
def test_random_functions_are_known(function: Any, random: bool) -> None:
    assert is_random(_last(function, [_X])) is random


@pytest.mark.parametrize(("needs_gradient", "passes"), [(True, 3), (False, 1)])
def test_attention_counts_scores_and_values_forward_and_backward(needs_gradient: bool, passes: int) -> None:
    node = _last(lambda q: functional.scaled_dot_product_attention(q, q, q), [_HEADS])
    value = replace(TensorValue.of(_HEADS), needs_gradient=needs_gradient)
    assert attention_flops(node, [value]) == passes * (2 * 4 * 2 * 6 * 6 * 8) * 2
