"""What a joint graph says of a block: which value is whose, what backward asks for, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from strategies import StrategyError
from strategies.budget.compiled.compiled_capture import BlockRecorder
from strategies.budget.compiled.joint_graph import JointGraph
from strategies.budget.plan import Value


@pytest.fixture(autouse=True)
def no_trace_of_a_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def joint_of(function: Callable[..., Tensor], *shape: int) -> JointGraph:
    """Return the joint graph of a function of one tensor that needs a gradient."""
    recorder = BlockRecorder("block", "aot_eager")
    call = torch.compile(function, backend=recorder, dynamic=False, fullgraph=True)
    call(torch.ones(shape or (4, 6), requires_grad=True)).sum().backward()
    assert recorder.joint is not None
    return recorder.joint


def waves(x: Tensor) -> Tensor:
    return (x.sin() * 2).cos()


def norm(x: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x.t().exp(), (4,)).sin()


def names(nodes: object) -> list[str]:
    assert hasattr(nodes, "__iter__")
    return [str(node.target).removeprefix("aten.") for node in nodes if node.op == "call_function"]


def test_operators_have_the_numbers_of_a_step() -> None:
    assert names(joint_of(waves).operators) == ["sin.default", "mul.Tensor", "cos.default"]
    assert names(joint_of(norm).operators) == [
        "exp.default",
        "native_layer_norm.default",
        "sin.default",
    ]


def test_backward_asks_for_what_forward_makes_by_the_node_that_makes_it() -> None:
    graph = joint_of(norm)
    assert {node.name for node in graph.asked} == {"exp", "getitem", "getitem_1", "getitem_2"}
    results = [graph.node_of(Value(1, number, "aten.native_layer_norm.default")) for number in range(3)]
    assert [node.name for node in results] == ["getitem", "getitem_1", "getitem_2"]
    (view,) = (node for node in graph.module.graph.nodes if node.name == "t")
    assert graph.home(view).op == "placeholder"


def test_the_digest_says_what_follows_from_what_and_nothing_of_sizes() -> None:
    def scaled(x: Tensor) -> Tensor:
        return (x.sin() * 3).cos()

    def crossed(x: Tensor) -> Tensor:
        return (x.sin() * x).cos()

    def rounded(x: Tensor) -> Tensor:
        return (x.sin() * 2).to(torch.float64).cos()

    digest = joint_of(waves).digest
    assert digest == joint_of(waves, 2, 3).digest == joint_of(scaled).digest
    assert len({digest, joint_of(crossed).digest, joint_of(rounded).digest, joint_of(norm).digest}) == 4


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            Value(9, 0, "aten.sin.default"),
            "the plan of 'block' names aten.sin.default.0 (9), which its graph",
        ),
        (
            Value(0, 0, "aten.cos.default"),
            "the plan of 'block' names aten.cos.default.0 (0), which its graph",
        ),
    ],
    ids=["no such number", "another operator"],
)
def test_a_value_that_the_graph_has_not_is_refused(value: Value, message: str) -> None:
    with pytest.raises(StrategyError) as error:
        joint_of(waves).node_of(value)
    assert str(error.value).startswith(f"ac: {message}")


def test_a_view_that_does_not_say_so_is_no_value_of_its_own() -> None:
    def flat(x: Tensor) -> Tensor:
        viewed: Tensor = torch.ops.aten._unsafe_view.default(x.exp(), [24])
        return viewed.sin()

    with pytest.raises(
        StrategyError, match=r"^ac\.executor: aten\._unsafe_view\.default\.0 \(1\) of 'block' lies on memory"
    ):
        joint_of(flat).node_of(Value(1, 0, "aten._unsafe_view.default"))
