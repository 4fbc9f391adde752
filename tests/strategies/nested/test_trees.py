"""The law of nested recomputation: with early stop off, a call runs once more for each region around it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from strategies.ac.nested import Nested
from tests.strategies.meters import Meter, measure
from tests.strategies.nested.chain import Chain
from tests.strategies.nested.examination import Calls, different, step
from tests.strategies.toys import Layers

SEED = {
    "linear1": [0, 0, 0],
    "linear2": [0, 0, None],
    "linear3": [0, 0, 1],
    "linear4": [0, 1, None],
    "linear5": 1,
}
WIDTH = 4


@pytest.mark.parametrize(
    ("early_stop", "calls"),
    [(False, [4, 3, 4, 3, 2, 1]), (True, [3, 3, 2, 1, 1, 1])],
    ids=["to the end", "until the last tensor is there"],
)
def test_the_calls_of_the_seed(early_stop: bool, calls: list[int]) -> None:
    torch.manual_seed(0)
    plain = Chain()
    model = Nested(labels=SEED, early_stop=early_stop).apply(copy.deepcopy(plain))
    counted = Calls(model, nn.Linear)
    x = torch.randn(4, 4)
    expected = step(plain, x.clone().requires_grad_())
    assert different(expected, step(model, x.clone().requires_grad_())) == []
    assert [counted[f"linear{index}"] for index in range(1, 7)] == calls


@pytest.mark.parametrize(
    ("levels", "calls"),
    [([1], 16), ([1, 2], 20), ([1, 2, 2], 24), ([1, 2, 2, 2], 28)],
    ids=["one region", "and halves", "and quarters", "and eighths"],
)
def test_halvings_save_one_activation_however_many(levels: list[int], calls: int) -> None:
    torch.manual_seed(0)
    plain = Layers(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)))
    model = Nested(layers_fqn="layers", levels=levels).apply(copy.deepcopy(plain))
    counted = Calls(model, nn.Linear)
    x = torch.randn(1024, 256)
    with Meter(x, *model.parameters()) as meter:
        outputs = model(x)
        assert meter.alive_bytes(on_host=False) == 1 << 20  # the output, and nothing else
    del outputs
    assert measure(plain, x).saved_bytes == 7 << 20
    counted.counts.clear()
    assert different(step(plain, x), step(model, x)) == []
    assert counted.counts.total() == calls


class Node(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return functional.dropout(self.linear(x) * other.cos(), 0.3)


class Branched(nn.Module):
    """Nodes that take the result before and one further back, with functions between them."""

    def __init__(self, back: list[int], glue: list[int]) -> None:
        super().__init__()
        self.nodes = nn.ModuleList(Node() for _ in back)
        self.back = tuple(back)
        self.glue = tuple(glue)

    def forward(self, x: Tensor) -> Any:
        made = [x]
        for at, node in enumerate(self.nodes):
            y = node(made[-1], made[max(0, len(made) - 1 - self.back[at])])
            if self.glue[at] == 1:
                y = functional.dropout(y, 0.2) + made[-1]
            elif self.glue[at] == 2:
                left, right = y.chunk(2, -1)
                y = torch.cat([right, left.sin()], -1)
            elif self.glue[at] == 3:
                y = y + self.nodes[0].linear.weight[0]  # type: ignore[index, union-attr]
            made.append(y)
        return made[-1], made[len(made) // 2]


@st.composite
def labelled(draw: st.DrawFn, count: int, depth: int = 0) -> list[list[int]]:
    """Return a path for each of `count` nodes, of regions that nest."""
    paths: list[list[int]] = []
    index = 0
    while len(paths) < count:
        size = draw(st.integers(1, count - len(paths)))
        inside = draw(st.booleans()) if depth else draw(st.integers(0, 3)) > 0
        if inside and depth < 4:
            paths += [[index, *path] for path in draw(labelled(size, depth + 1))]
            index += 1
        else:
            paths += [[]] * size
    return paths


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[int], list[list[int]]]:
    count = draw(st.integers(1, 8))
    numbers = st.lists(st.integers(0, 3), min_size=count, max_size=count)
    return draw(numbers), draw(numbers), draw(labelled(count))


Case = tuple[list[int], list[int], list[list[int]]]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(cases())
def test_every_region_around_a_node_is_one_more_call(case: Case) -> None:
    assert_one_call_a_region(*case)


@pytest.mark.matrix
@pytest.mark.slow
@settings(max_examples=400, deadline=None, derandomize=True)
@given(cases())
def test_every_region_around_a_node_of_many_more_trees(case: Case) -> None:
    assert_one_call_a_region(*case)


def assert_one_call_a_region(back: list[int], glue: list[int], paths: list[list[int]]) -> None:
    torch.manual_seed(0)
    plain = Branched(back, glue)
    labels = {f"nodes.{at}": path for at, path in enumerate(paths)}
    model = Nested(labels=labels, early_stop=False).apply(copy.deepcopy(plain))
    counted = Calls(model, Node)
    x = torch.randn(2, WIDTH)
    expected = step(plain, x.clone().requires_grad_())
    assert different(expected, step(model, x.clone().requires_grad_())) == []
    assert {fqn: counted[fqn] for fqn in labels} == {fqn: 1 + len(path) for fqn, path in labels.items()}
