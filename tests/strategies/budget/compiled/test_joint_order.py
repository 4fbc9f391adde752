"""The order of backward: what runs again comes before its reader, and what is made again before each."""

from __future__ import annotations

import pytest
from torch import Tensor

from strategies.budget.compiled.joint_order import backward_runs
from tests.strategies.budget.compiled.test_joint_graph import joint_of, no_trace_of_a_compiler

__all__ = ["no_trace_of_a_compiler"]


@pytest.mark.parametrize(
    "kept",
    [
        pytest.param((), id="nothing"),
        pytest.param(("sin",), id="one"),
        pytest.param(("sin", "mul"), id="all"),
    ],
)
def test_what_is_not_kept_runs_again_before_its_first_reader(kept: tuple[str, ...]) -> None:
    def deep(x: Tensor) -> Tensor:
        return ((x.sin().cos() * 2).exp() * 3).sin()

    graph = joint_of(deep)
    by_name = {node.name: node for node in graph.module.graph.nodes}
    runs = backward_runs(graph, frozenset(by_name[name] for name in kept), frozenset())
    order = [run.node for run in runs]
    place = {node: number for number, node in enumerate(order)}
    again = [node for node in order if node in graph.operators]
    assert not {node.name for node in again} & set(kept)
    assert again == sorted(again, key=list(graph.module.graph.nodes).index)
    for node in again:
        first = min(place[user] for user in node.users if user in place)
        assert all(each in again for each in order[place[node] + 1 : first])


def test_what_is_made_again_runs_before_each_reader() -> None:
    def waves(x: Tensor) -> Tensor:
        return (x.sin().exp() * 3).sin()

    graph = joint_of(waves)
    by_name = {node.name: node for node in graph.module.graph.nodes}
    ran = {}
    for again in ((), ("exp",), ("sin", "exp")):
        runs = backward_runs(graph, frozenset(), frozenset(by_name[name] for name in again))
        ran[again] = [run.node.name for run in runs if run.node in graph.operators]
        for number, run in enumerate(runs):
            latest = {each.node: place for place, each in enumerate(runs[:number])}
            assert run.reads == {each: latest[each] for each in run.node.all_input_nodes if each in latest}
    assert ran[()] == ["sin", "exp", "mul"]
    assert ran["exp",] == ["sin", "exp", "mul", "exp"]
    assert ran["sin", "exp"] == ["sin", "exp", "mul", "sin", "exp"]
