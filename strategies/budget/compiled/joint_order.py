"""In which order backward of a planned block runs, and which run of a node each of them reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch.fx import Node

from strategies.budget.compiled.joint_graph import JointGraph
from strategies.budget.compiled.joint_steps import maker_of
from strategies.step.needed import needed


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run of a node in backward.

    Fields:
        reads: the run that each node it reads stems from, by number; inputs of backward stem from none.
    """

    node: Node
    reads: Mapping[Node, int]


def backward_runs(graph: JointGraph, kept: frozenset[Node], again: frozenset[Node]) -> list[Run]:
    """Return the runs of backward, in order.

    What is not kept runs again just before the first node that reads it, in the order of forward; and what
    is made `again`, before each.

    Args:
        kept: homes that forward saves.
        again: homes that are made anew for each node of backward that reads them, and dropped after it.
    """
    return _Order(graph, kept, again).runs


class _Order:
    """Enters runs one by one."""

    def __init__(self, graph: JointGraph, kept: frozenset[Node], again: frozenset[Node]) -> None:
        self.runs: list[Run] = []
        self._graph, self._kept = graph, kept
        self._fleeting = again.union(map(maker_of, again))
        self._there: dict[Node, int] = {}
        for node in graph.plain_backward:
            given: dict[Node, int] = {}
            for home in graph.asks(node):
                given |= self._made(home)
            if node not in self._there:
                self._there[node] = self._entered(node, {**self._there, **given})

    def _made(self, home: Node) -> Mapping[Node, int]:
        """Run what a storage needs; return the run that it stems from, where it is made for one reader."""
        fresh: dict[Node, int] = {}
        for unit in self._closure(home):
            for node in (unit, *self._graph.results_of(unit)):
                if node not in self._there and node not in self._kept:
                    self._repeat(node, fresh)
        return {home: fresh[home]} if home in fresh else {}

    def _repeat(self, node: Node, fresh: dict[Node, int]) -> None:
        """Enter a run of a node of forward, behind those of views that it needs.

        Args:
            fresh: runs of what is made for the present reader alone, views of it among them.
        """
        known: dict[Node, int] = {}
        for each in node.all_input_nodes:
            runs = self._runs_with(each, fresh)
            if each.op != "placeholder" and each not in self._kept and each not in runs:
                self._repeat(each, fresh)
            known |= {each: runs[each]} if each in runs else {}
        self._runs_with(node, fresh)[node] = self._entered(node, known)

    def _runs_with(self, node: Node, fresh: dict[Node, int]) -> dict[Node, int]:
        return fresh if {node, self._graph.home(node)} & self._fleeting else self._there

    def _entered(self, node: Node, known: Mapping[Node, int]) -> int:
        reads = {each: known[each] for each in node.all_input_nodes if each in known}
        self.runs.append(Run(node=node, reads=reads))
        return len(self.runs) - 1

    def _closure(self, home: Node) -> Iterable[Node]:
        """Return the operators that run again for a storage, in the order of forward."""

        def missing(homes: Iterable[Node]) -> list[Node]:
            makers = [maker_of(each) for each in homes if each not in self._kept and each not in self._there]
            return [unit for unit in makers if unit.op == "call_function"]

        found = needed(missing([home]), lambda unit: missing(map(self._graph.home, unit.all_input_nodes)))
        return self._graph.in_order(found)
