"""Values of a loop's bodies that its backward reads, and which of them are worth keeping.

Backward runs a body again for what autograd saves. Many bodies end in a product of whose result autograd
saves nothing: its gradients follow from its operands alone, so that backward need not multiply. A value that
forward keeps is such an end too: nothing is computed for it again.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from strategies.chunk.flow.chunk_rules import is_pointwise
from strategies.chunk.loops.loop import Loop, can_be_put_together, is_product
from strategies.estimate.liveness import Key, Storages
from strategies.estimate.machine import Machine
from strategies.estimate.operator_cost import bytes_of, cost_of, remembered, tensors_of


def read_again(loop: Loop, storages: Storages, saves: Mapping[fx.Node, frozenset[Key]]) -> frozenset[fx.Node]:
    """Return the members whose values backward reads, for gradients or to compute such values.

    Args:
        loop: loop of a graph that was recorded with gradients.
        storages: storages of the graph.
        saves: storages that autograd keeps, by node.
    """
    members = loop.region.members
    saved = {key for node in members for key in saves[node]}
    untold = _untold_of(loop)
    read: set[fx.Node] = set()
    for node in reversed(members):
        if node in untold or not saved.isdisjoint(storages.keys[node]):
            read.add(node)
        if node in read and node not in loop.kept:
            read.update(loop.local_sources(node))
    return frozenset(read)


def unread_products(
    loop: Loop, storages: Storages, saves: Mapping[fx.Node, frozenset[Key]]
) -> frozenset[fx.Node]:
    """Return the products of a loop whose results backward does not read; see `read_again`."""
    products = [node for node in loop.region.members if is_product(node)]
    if not products or not storages.has_gradients or loop.ahead is not None:
        return frozenset()
    return frozenset(products) - (read_again(loop, storages, saves) - loop.kept)


def most_worth_keeping(
    loop: Loop, storages: Storages, saves: Mapping[fx.Node, frozenset[Key]], machine: Machine
) -> fx.Node | None:
    """Return the member whose value saves most seconds for its bytes, `None` where none saves any.

    Args:
        loop: loop with a backward.
        storages: storages of the graph.
        saves: storages that autograd keeps, by node.
        machine: device whose time is saved.
    """
    made = {result.node for result in loop.outputs}
    gains: dict[fx.Node, float] = {}
    for node in loop.region.members:
        if node in loop.kept or not _may_be_kept(loop, node, storages, saves):
            continue
        unread = unread_products(replace(loop, kept=loop.kept | {node}), storages, saves)
        nbytes = bytes_of(node.meta["val"])
        copied_s = (1 if node in made else 3) * nbytes / machine.bytes_per_s
        seconds = sum(cost_of(each).seconds(machine) for each in unread - loop.unread) - copied_s
        if seconds > 0:
            gains[node] = seconds / (1 if node in made else nbytes)
    return max(gains, key=lambda node: gains[node], default=None)


def _may_be_kept(
    loop: Loop, node: fx.Node, storages: Storages, saves: Mapping[fx.Node, frozenset[Key]]
) -> bool:
    """Return whether all chunks of a value can be put together, and its own backward does not read it."""
    is_maker = is_product(node) or (is_pointwise(node) and node not in _untold_of(loop))
    if not is_maker or node in loop.region.copies or node in (*loop.losses, *loop.losses.values()):
        return False
    value = node.meta["val"]
    is_cut = bool(loop.region.axes[node]) and can_be_put_together(loop.region, node)
    is_saved_by_itself = not saves[node].isdisjoint(storages.made[node])
    is_dense = torch.ops.aten.is_non_overlapping_and_dense.default(value)
    return is_cut and value.requires_grad and is_dense and not is_saved_by_itself


def _untold_of(loop: Loop) -> frozenset[fx.Node]:
    return _untold(next(iter(reversed(loop.region.members[0].graph.nodes))))


@remembered
def _untold(output: fx.Node) -> frozenset[fx.Node]:
    """Return the nodes of a graph, by its output, that do not tell what their backward reads.

    Those that the recorder has put in place of others have no autograd function, and what follows has that
    of the others. Operators that torch has not written may read what they like.
    """
    found: set[fx.Node] = set()
    for node in output.graph.nodes:
        if node.op != "call_function" or node.target is torch.ops.aten.detach.default:
            continue
        results = [tensor for tensor in tensors_of(node) if tensor.is_floating_point()]
        is_torch = node.target is operator.getitem or getattr(node.target, "namespace", "") == "aten"
        has_function = "grad_fn" in node.meta or any(tensor.grad_fn is not None for tensor in results)
        inputs = node.all_input_nodes
        is_given = any(tensor.requires_grad for each in inputs for tensor in tensors_of(each))
        if results and (not is_torch or not found.isdisjoint(inputs) or (is_given and not has_function)):
            found.add(node)
    return frozenset(found)
