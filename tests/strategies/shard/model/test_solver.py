from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from math import inf

import pytest
from torch.distributed.tensor import Replicate

from strategies.shard.candidates.redistribution import Collective
from strategies.shard.model.graph import ModelGraph, Node
from strategies.shard.model.module_options import NodeOption
from strategies.shard.model.placement_state import SUMMED, WHOLE, State, sharded
from strategies.shard.model.solver import Limits, cheapest, smallest_memory_bytes

_S0 = sharded(0)


def _option(inputs: tuple[State, ...], output: State, us: float, moved: int = 0, held: int = 0) -> NodeOption:
    collective = Collective(
        phase="forward", kind="all_reduce", mesh_axis=0, ranks=2, payload_bytes=moved, operand="x"
    )
    return NodeOption(
        inputs=inputs,
        output=output,
        collectives=(collective,) if moved else (),
        seconds=us * 1e-6,
        memory_bytes=held,
    )


def _node(name: str, sources: tuple[int, ...], *options: NodeOption) -> Node:
    return Node(name=name, sources=sources, options=options)


def _diamond() -> ModelGraph:
    """One source, two branches that prefer other states, and a sum that wants them in one."""
    return ModelGraph(
        nodes=(
            _node("x", (), _option((), WHOLE, 0)),
            _node(
                "left",
                (0,),
                _option((WHOLE,), WHOLE, 9, held=8),
                _option((WHOLE,), _S0, 2, moved=4, held=4),
            ),
            _node(
                "right",
                (0,),
                _option((WHOLE,), WHOLE, 3, held=8),
                _option((WHOLE,), _S0, 4, moved=8, held=4),
                _option((WHOLE,), SUMMED, 1, held=8),
            ),
            _node(
                "sum",
                (1, 2),
                _option((WHOLE, WHOLE), WHOLE, 1, held=8),
                _option((_S0, _S0), _S0, 1, held=4),
            ),
            _node(
                "out", (3,), _option((WHOLE,), WHOLE, 1, held=8), _option((_S0,), WHOLE, 3, moved=8, held=8)
            ),
        ),
        outputs=(4,),
    )


def _choices(graph: ModelGraph) -> Iterator[tuple[NodeOption, ...]]:
    """Yield every choice whose states fit."""
    for choice in product(*(node.options for node in graph.nodes)):
        fits = all(
            choice[source].output == option.inputs[at]
            for node, option in zip(graph.nodes, choice, strict=True)
            for at, source in enumerate(node.sources)
        )
        if fits and all(choice[index].output == WHOLE for index in graph.outputs):
            yield choice


def _total(choice: tuple[NodeOption, ...], size: Callable[[NodeOption], float]) -> float:
    return sum(map(size, choice))


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param(Limits(), id="any amount"),
        pytest.param(Limits(memory_bytes=24), id="little memory"),
        pytest.param(Limits(communicated_bytes=19), id="few bytes"),
        pytest.param(Limits(communicated_bytes=0), id="no communication"),
        pytest.param(Limits(memory_bytes=19), id="too little memory"),
    ],
)
def test_is_the_best_of_all_choices(limits: Limits) -> None:
    graph = _diamond()
    allowed = [
        choice
        for choice in _choices(graph)
        if _total(choice, lambda option: option.memory_bytes) <= (limits.memory_bytes or inf)
        and _total(choice, lambda option: option.communicated_bytes)
        <= (inf if limits.communicated_bytes is None else limits.communicated_bytes)
    ]
    best = min(allowed, key=lambda choice: _total(choice, lambda option: option.seconds), default=None)
    assert cheapest(graph, limits) == best


def test_of_equal_times_the_fewest_bytes_win() -> None:
    few = _option((WHOLE,), WHOLE, 2, moved=4, held=2)
    graph = ModelGraph(
        nodes=(
            _node("x", (), _option((), WHOLE, 0)),
            _node("y", (0,), _option((WHOLE,), WHOLE, 2, moved=8, held=1), few),
        ),
        outputs=(1,),
    )
    assert cheapest(graph, Limits()) == (graph.nodes[0].options[0], few)


def test_a_limit_is_kept_to_the_byte() -> None:
    large = _option((WHOLE,), WHOLE, 1, held=1_000_000_001)
    small = _option((WHOLE,), WHOLE, 2, held=1_000_000_000)
    graph = ModelGraph(
        nodes=(_node("x", (), _option((), WHOLE, 0)), _node("y", (0,), large, small)), outputs=(1,)
    )
    assert cheapest(graph, Limits(memory_bytes=1_000_000_000)) == (graph.nodes[0].options[0], small)
    assert cheapest(graph, Limits(memory_bytes=1_000_000_001)) == (graph.nodes[0].options[0], large)


def test_the_smallest_memory_is_that_of_the_best_choice() -> None:
    graph = _diamond()
    assert smallest_memory_bytes(graph) == min(
        _total(choice, lambda option: option.memory_bytes) for choice in _choices(graph)
    )


def test_what_is_resident_leaves_less_for_options() -> None:
    graph = replace(_diamond(), resident_bytes=100)
    assert cheapest(graph, Limits(memory_bytes=124)) == cheapest(_diamond(), Limits(memory_bytes=24))
    assert cheapest(graph, Limits(memory_bytes=99)) is None
    smallest = smallest_memory_bytes(_diamond())
    assert smallest is not None
    assert smallest_memory_bytes(graph) == 100 + smallest


def test_states_that_never_fit_have_no_choice() -> None:
    graph = ModelGraph(
        nodes=(_node("x", (), _option((), WHOLE, 0)), _node("y", (0,), _option((_S0,), WHOLE, 0))),
        outputs=(1,),
    )
    assert cheapest(graph, Limits()) is None
    assert smallest_memory_bytes(graph) is None


def test_an_output_is_whole() -> None:
    graph = ModelGraph(nodes=(_node("x", (), _option((), _S0, 0), _option((), WHOLE, 1)),), outputs=(0,))
    chosen = cheapest(graph, Limits())
    assert chosen is not None
    assert chosen[0].output.value == Replicate()
