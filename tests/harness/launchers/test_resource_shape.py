"""Shapes: what a mesh asks for, how trials are grouped by it, and how people read it."""

from __future__ import annotations

import pytest

from harness.launchers.resource_shape import Resources, Shape, by_shape, shape_of, shapes_in_words
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


@pytest.mark.parametrize(
    ("said", "threads"),
    [
        pytest.param(None, 2, id="nothing is said: the share of the cores"),
        pytest.param("1", 1, id="the user allows fewer"),
        pytest.param("64", 2, id="the user allows more than there are"),
        pytest.param("1,4", 1, id="nested parallelism: the outer level"),
        pytest.param("many", 2, id="what torch cannot read either"),
        pytest.param("0", 2, id="none is no number of threads"),
    ],
)
def test_threads_of_a_rank(monkeypatch: pytest.MonkeyPatch, said: str | None, threads: int) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if said is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert Resources(core_count=8).threads_of_rank(4) == threads
    assert Resources(core_count=2).threads_of_rank(4) == 1
