"""In-place reuse: an elementwise operator overwrites its first input if that value has no later use.

This is only for graphs without gradients. Eager mode keeps both tensors, because it cannot know whether `x`
in `silu(x)` is used again; a graph shows it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

_aten = torch.ops.aten


class Overwrite(NamedTuple):
    """An operator that overwrites its first input.

    Fields:
        target: in-place form of the operator.
        over: nodes whose values share the overwritten memory; only the operator and these nodes use them.
    """

    target: Any
    over: frozenset[fx.Node]


def overwrites(
    graph: fx.Graph,
    storages: Mapping[fx.Node, tuple[Hashable, ...]],
    made: Mapping[fx.Node, Mapping[Hashable, int]],
) -> dict[fx.Node, Overwrite]:
    """Return the nodes that may overwrite an input, whatever the order in which nodes run.

    Args:
        storages: storages of each node's value.
        made: storages that each node allocates, with their bytes.
    """
    on: dict[Hashable, set[fx.Node]] = {}
    for node, keys in storages.items():
        for key in keys:
            on.setdefault(key, set()).add(node)
    makers = {key for node, keys in made.items() if node.op == "call_function" for key in keys}
    known = {key: nodes for key, nodes in on.items() if key in makers}
    found = ((node, _overwrite(node, storages, known)) for node in graph.nodes if node.op == "call_function")
    return {node: each for node, each in found if each is not None}


def _overwrite(
    node: fx.Node,
    storages: Mapping[fx.Node, tuple[Hashable, ...]],
    known: Mapping[Hashable, set[fx.Node]],
) -> Overwrite | None:
    """Return how `node` can write over its first input, `None` where somebody still needs that memory."""
    target = _in_place(node.target)
    if target is None or node.meta["written"] or not isinstance(node.args[0], fx.Node):
        return None
    source = node.args[0]
    (key, *others) = storages[source]
    if others or key not in known or not _has_layout_of(source, node):
        return None
    over = known[key]
    if over.isdisjoint(set(node.all_input_nodes) - {source}) and _is_last(node, over, key, storages):
        return Overwrite(target, frozenset(over))
    return None


@functools.cache
def _in_place(target: Any) -> Any:
    """Return the operator that does the same in place of its first tensor, `None` where there is none."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":  # noqa: SLF001 (their class)
        return None
    is_elementwise = torch.Tag.pointwise in target.tags or target.overloadpacket is _aten.masked_fill
    if not is_elementwise or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    packet = getattr(_aten, f"{target.overloadpacket.__name__}_", None)
    return getattr(packet, target._overloadname, None)  # noqa: SLF001 (no public name)


def _has_layout_of(source: fx.Node, node: fx.Node) -> bool:
    """Return whether the memory of `source` can hold `node`: same layout, nothing else on it."""
    old, new = source.meta["val"], node.meta["val"]
    if not (isinstance(old, Tensor) and isinstance(new, Tensor)):
        return False
    is_alike = old.shape == new.shape and old.stride() == new.stride() and old.dtype == new.dtype
    is_whole = old.untyped_storage().nbytes() == old.numel() * old.element_size()
    return is_alike and is_whole and bool(_aten.is_non_overlapping_and_dense.default(old))


def _is_last(
    node: fx.Node,
    over: set[fx.Node],
    key: Hashable,
    storages: Mapping[fx.Node, tuple[Hashable, ...]],
) -> bool:
    """Say if only `node` and the nodes in `over`, which share one storage, use the values in `over`."""
    for each in over:
        if each.op != "call_function" or each.meta["written"]:
            return False
        for user in each.users:
            is_part = user.target is operator.getitem and key not in storages[user]
            if user not in over and user is not node and not is_part:
                return False
    return True
