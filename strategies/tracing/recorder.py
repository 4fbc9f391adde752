"""State of both recorders of forwards: the graph, which node made which tensor, what was read."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from strategies.tracing.module_state import BOOKKEEPING, CONSTANTS, HOOKS

OF_CALLS = frozenset({*HOOKS, "forward"})
"""Attributes of a module that its calls read."""

_UNREAD = BOOKKEEPING.difference(HOOKS) | {"_compiled_call_impl"}  # that calls read, and no forward


@dataclass(frozen=True, slots=True)
class OutputIndex:
    """A position in the output of a graph."""

    index: int


@dataclass(kw_only=True, slots=True)
class Frame:
    """A forward that is being recorded.

    Fields:
        fqn: FQN of the module whose forward runs.
        nodes: node that made each tensor, by `id`.
        reads: FQN and attribute of what forward has read of modules, in order.
    """

    fqn: str = ""
    graph: fx.Graph = field(default_factory=fx.Graph)
    nodes: dict[int, fx.Node] = field(default_factory=dict)
    reads: dict[tuple[str, str], None] = field(default_factory=dict)
    _alive: list[Tensor] = field(default_factory=list)

    def own(self, tensor: Tensor, node: fx.Node) -> None:
        """Note that `node` stands for `tensor`."""
        self.nodes[id(tensor)] = node
        self._alive.append(tensor)  # an `id` is only its own while it lives
        node.meta.setdefault("val", tensor)

    def parts(self, result: Any, node: fx.Node, left_out: tuple[type, ...]) -> Iterator[tuple[Any, fx.Node]]:
        """Yield the parts of a mapping or sequence, each with a node that takes it out of `node`."""
        for key, part in result.items() if isinstance(result, Mapping) else enumerate(result):
            if not isinstance(part, left_out):
                yield part, self.graph.call_function(operator.getitem, (node, key))

    def note_read(self, fqn: str, name: str) -> None:
        """Note that forward, or a call in it, reads the attribute `name` of the module `fqn`."""
        if name not in _UNREAD and (fqn or name not in OF_CALLS):
            self.reads[fqn, name] = None

    def finish(
        self,
        leaves: Sequence[Any],
        node_of: Callable[[Tensor], fx.Node],
        error: Callable[[str], Exception],
    ) -> tuple[tuple[Any, ...], fx.Node]:
        """End the graph with what forward returns.

        Args:
            error: makes an error of the end of a sentence.

        Returns:
            The leaves with each tensor as its `OutputIndex`, and the output node.
        """
        outputs: list[Any] = []
        tensors: list[fx.Node] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                outputs.append(OutputIndex(len(tensors)))
                tensors.append(node_of(leaf))
            elif isinstance(leaf, CONSTANTS):
                outputs.append(leaf)
            else:
                raise error(f"returns a {type(leaf).__name__}, which no graph can hold")
        return tuple(outputs), self.graph.output(tuple(tensors))


def leaves_of(outputs: Sequence[Any], results: Sequence[Tensor]) -> list[Any]:
    """Return the leaves of what forward returns. `outputs`: leaves, each tensor as its `OutputIndex`."""
    return [results[each.index] if isinstance(each, OutputIndex) else each for each in outputs]
