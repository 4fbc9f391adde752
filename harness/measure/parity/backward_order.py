"""The order in which backward makes the gradients of parameters, read from the graph of a forward pass.

The engine of autograd runs, of the nodes that are ready, the one made last in forward, and accumulates a
gradient as soon as it is ready. That order is found here without running anything and without a hook, so
that the pass is the one that nobody watches.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import count

from torch import Tensor
from torch.autograd.graph import Node

from strategies.step.position import FIRST_UNORDERED_NODE, sequence_number


def backward_order(loss: Tensor, parameters: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the names of `parameters` in the order in which backward of `loss` will make their gradients.

    Names that the graph does not know follow, the last registered first: parameters without gradient, and
    those of which FSDP differentiates a copy.

    Args:
        loss: scalar loss, whose backward has not run.
        parameters: named parameters, in order of registration.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    found = dict.fromkeys(
        names[id(leaf)] for leaf in _leaves(loss.grad_fn) if leaf is not None and id(leaf) in names
    )
    return (*found, *(name for name in reversed(list(parameters)) if name not in found))


def _leaves(root: Node | None) -> Iterator[Tensor | None]:
    """Yield the leaf of each node that accumulates a gradient, in the order of the engine."""
    if root is None:
        return
    waiting, tie = edges_below(root), count()
    ready = [(-sequence_number(root), next(tie), root)]
    while ready:
        _, _, node = heapq.heappop(ready)
        if sequence_number(node) >= FIRST_UNORDERED_NODE:  # it accumulates a gradient
            yield getattr(node, "variable", None)
        for following, _ in node.next_functions:
            if following is None:
                continue
            waiting[following] -= 1
            if waiting[following] == 0:
                heapq.heappush(ready, (-sequence_number(following), next(tie), following))


def edges_below(root: Node) -> Counter[Node]:
    """Return how many edges lead to each node below `root`."""
    edges: Counter[Node] = Counter()
    seen, left = {root}, [root]
    while left:
        for following, _ in left.pop().next_functions:
            if following is None:
                continue
            edges[following] += 1
            if following not in seen:
                seen.add(following)
                left.append(following)
    return edges
