"""Equal views of one value are one view: a loop that takes both would hold two gradients."""

from __future__ import annotations

from collections.abc import Hashable

from torch import fx

from strategies.estimate.operator_cost import is_view


def merge_equal_views(graph: fx.Graph) -> None:
    """Let the users of equal views take the first of them.

    Views of memory that somebody writes to stay apart, and so do those that the graph returns.

    Args:
        graph: recorded operators, with `meta["written"]`; see `ScopeGraph`.
    """
    known: dict[Hashable, fx.Node] = {}
    output = next(iter(reversed(graph.nodes)))
    returned = set(output.all_input_nodes)
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_view(node) or node.meta["written"] or node in returned:
            continue
        key = node.target, repr(node.args), repr(node.kwargs)
        first = known.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
