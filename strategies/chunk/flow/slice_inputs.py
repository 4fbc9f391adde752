"""Slicing of a region's inputs: the loop takes only the part of a value that it uses.

A loop holds a gradient as large as each of its inputs. A loop over queries that takes queries, keys and
values as one tensor would hold a gradient of three times the size that it needs.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, fx

from strategies.chunk.flow.chunk_region import ChunkRegion
from strategies.chunk.flow.chunk_rules import slots
from strategies.estimate.liveness import Key, key_of
from strategies.estimate.operator_cost import bytes_of, is_view, tensors_of


def slice_inputs(region: ChunkRegion) -> ChunkRegion:
    """Return the region with views that are smaller than its inputs moved in front of it."""
    views = _views_of_inputs(region)
    small = {root for root in views.values() if _is_small(region, root, views)}
    gone = {node for node, root in views.items() if root in small}
    kept = [node for node in region.members if node not in gone]
    if not gone or len(kept) < 2:  # noqa: PLR2004 (one operator gains nothing)
        return region
    early = gone | set(region.before)
    return replace(
        region,
        members=kept,
        axes={node: region.axes[node] for node in kept},
        needs={node: region.needs[node] for node in kept},
        before=[node for node in region.window if node in early],
        copies=region.copies - gone,
        has_sliced_inputs=True,
    )


def _views_of_inputs(region: ChunkRegion) -> dict[fx.Node, fx.Node]:
    members = set(region.members)
    views: dict[fx.Node, fx.Node] = {}
    for node in region.members:
        inputs = slots(node)
        if len(inputs) == 1 and is_view(node):
            source = inputs[0]
            root = source if source not in members else views.get(source)
            if root is not None and _storages(node) <= _storages(root):
                views[node] = root
    return views


def _is_small(region: ChunkRegion, root: fx.Node, views: dict[fx.Node, fx.Node]) -> bool:
    """Return whether members use `root` through views only, and these are smaller together."""
    if not isinstance(root.meta.get("val"), Tensor):
        return False
    users = [node for node in region.members if root in slots(node)]
    own = {node for node, each in views.items() if each is root}
    used = [node for node in own if any(user in region.axes and user not in own for user in node.users)]
    total = sum(bytes_of(node.meta["val"]) for node in used)
    return all(user in own for user in users) and 0 < total < bytes_of(root.meta["val"])


def _storages(node: fx.Node) -> set[Key]:
    return set(map(key_of, tensors_of(node)))
