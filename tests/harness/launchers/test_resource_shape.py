"""Shapes: what a mesh asks for, how trials are grouped by it, and how people read it."""

from __future__ import annotations

import pytest

from harness.launchers.resource_shape import Shape, by_shape, shape_of, shapes_in_words
from tests.harness.composing import experiment_of

ONE = Shape(nodes=1, ranks_per_node=1, device="cpu")
TWO = Shape(nodes=1, ranks_per_node=2, device="cpu")
NODES = Shape(nodes=2, ranks_per_node=1, device="cpu")
CUDA = Shape(nodes=1, ranks_per_node=1, device="cuda")


@pytest.mark.parametrize(
    ("mesh", "shape"),
    [
        pytest.param("single", ONE, id="one rank"),
        pytest.param("shard2", TWO, id="two ranks on one node"),
        pytest.param("hsdp2x2", Shape(nodes=1, ranks_per_node=4, device="cpu"), id="a product of dimensions"),
    ],
)
def test_the_shape_of_a_mesh(mesh: str, shape: Shape) -> None:
    assert shape_of(experiment_of(f"model=mlp mesh={mesh}").mesh) == shape


def test_groups_go_from_small_to_large_and_keep_their_order() -> None:
    items = [(NODES, "a"), (TWO, "b"), (ONE, "c"), (TWO, "d"), (CUDA, "e"), (ONE, "f")]
    found = by_shape(items)
    assert list(found.items()) == [(ONE, ["c", "f"]), (CUDA, ["e"]), (TWO, ["b", "d"]), (NODES, ["a"])]


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        pytest.param({}, "", id="nothing"),
        pytest.param({ONE: 6, NODES: 2}, "1x1: 6, 2x1: 2", id="one device is not named"),
        pytest.param({ONE: 6, CUDA: 2}, "1x1 cpu: 6, 1x1 cuda: 2", id="several devices are"),
    ],
)
def test_shapes_in_words(counts: dict[Shape, int], words: str) -> None:
    assert shapes_in_words(counts) == words
