"""Group norms in two passes: sums of each channel first, then what they make of each element.

A norm needs all of its input before it gives any of its output. In two passes only its sums are needed first:
they can be added up chunk by chunk, and then chunks of the output follow from chunks of the input. Sums of a
concatenation are those of its parts, so that nobody needs it whole.

Shapes: B batch, C channels.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import torch
from torch import Tensor, fx


def norm_sums(x: Tensor) -> Tensor:
    """Return the sums of the elements of each channel, and of their squares, in float64, of shape (2, B, C).

    Args:
        x: (B, C, ...). Sums of parts of it along other dimensions add up to those of the whole.
    """
    batch, channels = x.shape[:2]
    rows = x.reshape(1, batch * channels, -1)
    mean, variance = torch.batch_norm_update_stats(rows, None, None, 0.0)  # without memory of the size of `x`
    mean = mean.double()
    sums = torch.stack((mean, variance.double().addcmul_(mean, mean)))
    return sums.mul_(rows.shape[2]).view(2, batch, channels)


def norm_scales(  # noqa: PLR0917 (a graph calls it by position)
    sums: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    count: int,
    n_groups: int,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return what a group norm multiplies each channel by, and what it adds, of shape (2, B, C).

    Args:
        sums: (2, B, C), as `norm_sums` returns them.
        weight, bias: (C,).
    """
    grouped = sums.unflatten(2, (n_groups, -1))
    mean, square = grouped.sum(-1, keepdim=True).div_(count * grouped.shape[3]).unbind()
    scale = (square - mean * mean).clamp_(min=0).add_(eps).rsqrt_()
    pair = torch.stack((scale, -scale * mean)).expand(grouped.shape).flatten(2)
    pair = pair if weight is None else pair * weight
    if bias is not None:
        pair = torch.stack((pair[0], pair[1] + bias))
    return pair.to(dtype)


def norm_applied(x: Tensor, scales: Tensor) -> Tensor:
    """Return `x` of shape (B, C, ...) with each channel multiplied and added to, as `norm_scales` says."""
    scale, shift = scales.view(*scales.shape, *[1] * (x.dim() - 2)).unbind()
    return (x * scale).add_(shift)


def whole_norms(nodes: AbstractSet[fx.Node]) -> dict[fx.Node, frozenset[fx.Node]]:
    """Return the norms all of whose passes are among `nodes`, and are of no other use.

    Returns:
        The nodes of last passes, each with those of the passes in front of it.
    """
    found: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in nodes:
        if node.target is not norm_applied:
            continue
        _, scales = node.all_input_nodes
        sums = scales.all_input_nodes[0]
        parts = sums.all_input_nodes if sums.target is torch.ops.aten.cat.default else [sums]
        front = {scales, sums, *parts}
        if front <= nodes and all(user in front or user is node for each in front for user in each.users):
            found[node] = frozenset(front)
    return found
