from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from strategies.fx.program import record, shadowed
from strategies.fx.scopes import Scope
from strategies.fx.shadow import Shadow
from strategies.shard.flow import attention_flops, flows, is_random, outputs_of
from strategies.shard.state import Value

_X = torch.zeros(4, 6, 8)
_HEADS = torch.zeros(4, 2, 6, 8)

FLOWS = [
    # function | inputs | "inputs -> output" of each flow but the whole one
    pytest.param(functional.gelu, [_X], ["R* -> R*", "S0 -> S0", "S1 -> S1", "S2 -> S2"], id="elementwise"),
    pytest.param(
        torch.add, [_X, _X], ["R* R* -> R*", "S0 S0 -> S0", "S1 S1 -> S1", "S2 S2 -> S2"], id="of two"
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
    pytest.param(lambda x: x[0], [_X], ["R* -> R*"], id="index: nothing is known"),
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
    pytest.param(lambda x: (x * 1).add_(1), [_X], [], id="what changes its input takes wholes"),
]
INDIVISIBLE = [
    pytest.param((3, 6, 8), ["R* -> R*", "S1 -> S1", "S2 -> S2"], id="batch"),
    pytest.param((3, 5, 7), ["R* -> R*"], id="everything"),
]


class _Calls(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


def _last(function: Callable[..., Tensor], inputs: list[Tensor]) -> fx.Node:
    shadow = Shadow.of(_Calls(function)).on(torch.device("cpu"))
    fakes = tuple(fake.requires_grad_() for fake in shadowed(shadow, tuple(inputs), torch.device("cpu")))
    graph = record(shadow, Scope(fqn="", through=frozenset(), paths={}, depth=0), fakes, {}).graph
    (output,) = (node for node in graph.nodes if node.op == "output")
    (last,) = output.all_input_nodes
    assert isinstance(last, fx.Node)
    source = last.args[0]
    if isinstance(source, fx.Node) and not isinstance(source.meta["val"], Tensor):
        return source  # of the parts that it picks from
    return last


def _inputs(node: fx.Node) -> list[Value]:
    return [
        Value.of(value) if isinstance(value := source.meta["val"], Tensor) else outputs_of(node)[0]
        for source in node.all_input_nodes
    ]


def _texts(node: fx.Node) -> list[str]:
    found = flows(node, _inputs(node), 2)
    assert {str(state) for state in (*found[0].inputs, found[0].output)} == {"R"}
    return [f"{' '.join(map(str, flow.inputs))} -> {flow.output}" for flow in found[1:]]


@pytest.mark.parametrize(("function", "inputs", "expected"), FLOWS)
def test_states_that_fit_together(function: Any, inputs: list[Tensor], expected: list[str]) -> None:
    assert _texts(_last(function, inputs)) == expected


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
    value = replace(Value.of(_HEADS), needs_gradient=needs_gradient)
    assert attention_flops(node, [value] * 3) == passes * (2 * 4 * 2 * 6 * 6 * 8) * 2
