"""Loops that make the gradients of their inputs in forward, because only a factor of these is still unknown.

A loss that is a sum, or a mean, over rows has one gradient for all of them: a number s that backward finds.
Each chunk is differentiated right after it was computed, as if s were 1, and backward multiplies by s. So
scores are made once, not twice, and backward needs neither them nor the inputs. The graph of the model says
where each element of a result goes, and the proof of the program compares what follows.

Source: Hsu et al. 2024, "Liger Kernel", arXiv:2410.10989, section 3.2 (FusedLinearCrossEntropy).
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod

import torch
from torch import Tensor, fx

from strategies.chunk.flow.chunk_rules import slots
from strategies.chunk.loops.loop import Loop
from strategies.estimate.operator_cost import is_view

_aten = torch.ops.aten
_SUMS = frozenset({_aten.sum.default, _aten.sum.dim_IntList, _aten.mean.default, _aten.mean.dim})
_NARROW = frozenset({torch.float16})
"""Sums of gradients that are not scaled yet may overflow here."""


def summed_up(loop: Loop, final: Collection[fx.Node]) -> fx.Node | None:
    """Return the one result with a gradient, if all its elements have the same; `None` otherwise.

    Args:
        loop: the loop.
        final: differentiable values of a graph from whose outputs backward starts; of another graph none.
    """
    graph = loop.region.members[0].graph
    (given,) = next(node for node in graph.nodes if node.op == "output").args
    made = [result for result in loop.outputs if result.node in final]
    if len(made) != 1 or any(map(loop.updates, loop.inputs)):
        return None
    if any(node.meta["val"].dim() for node in given if node in final):
        return None
    taken = [operand.node.meta["val"].dtype for operand in loop.inputs if operand.node in final]
    is_safe = _NARROW.isdisjoint(taken)
    return made[0].node if is_safe and _is_summed_up(made[0].node, set(loop.region.members)) else None


def _is_summed_up(node: fx.Node, members: set[fx.Node]) -> bool:
    """Return whether what follows a value is the sum of its elements, or their mean, and nothing else."""
    value: Tensor = node.meta["val"]
    while prod(value.shape) > 1 or value.dim():
        users = [user for user in node.users if user not in members]
        if len(users) != 1 or slots(users[0]) != [node]:
            return False
        (node,), before = users, value
        value = node.meta["val"]
        if node.target not in _SUMS and not (is_view(node) and value.numel() == before.numel()):
            return False
    return True
