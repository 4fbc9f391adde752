"""The cost of operators of a graph: FLOPs, bytes moved, and the seconds that a machine takes for them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar, TypeVarTuple

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from strategies.estimate.flops import flops_of, has_own_formula
from strategies.estimate.machine import MACHINES, Machine

_aten = torch.ops.aten
_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")
_MATRICES = {  # positions of the two matrices
    _aten.mm.default: (0, 1),
    _aten.addmm.default: (1, 2),
    _aten.bmm.default: (0, 1),
    _aten.baddbmm.default: (1, 2),
}

_ATTENTIONS = frozenset(
    {
        _aten._scaled_dot_product_flash_attention_for_cpu.default,  # noqa: SLF001 (the operators' names)
        _aten._scaled_dot_product_flash_attention.default,  # noqa: SLF001
        _aten._scaled_dot_product_efficient_attention.default,  # noqa: SLF001
        _aten._scaled_dot_product_cudnn_attention.default,  # noqa: SLF001
    }
)
"""Fused attention of (B, H, S, K)."""


def machine_for(device: torch.device) -> Machine:
    """Return the machine that stands for `device`."""
    return MACHINES.get(device.type, MACHINES["cuda"])


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorCost:
    """The work of one operator.

    Fields:
        flops: multiplications and additions in products, convolutions, attention and recurrent layers.
        rows: smallest outer size of a matrix product; 0 for other operators.
        is_free: true for a view, which moves nothing.
        name: name without namespace and overload.
        elements: elements of its operands or of its result, whichever are more.
    """

    flops: int
    moved_bytes: int
    rows: int
    is_free: bool
    name: str = ""
    elements: int = 0

    def seconds(self, machine: Machine, *, share: float = 1.0) -> float:
        """Return the time for a share of the operator's output.

        Args:
            machine: device that runs the operator.
            share: part of the output that is computed, in (0, 1].
        """
        if self.is_free:
            return machine.launch_s / 4
        work = self.flops * share, self.moved_bytes * share, self.rows * share
        return machine.operator_s(*work, name=self.name, elements=self.elements * share)


def remembered(
    function: Callable[[fx.Node, *_Arguments], _Result],
) -> Callable[[fx.Node, *_Arguments], _Result]:
    """Return a function of a node and hashable arguments that keeps its results in the node's `meta`."""
    name = function.__name__

    @functools.wraps(function)
    def recalled(node: fx.Node, *args: *_Arguments) -> _Result:
        """Return what `function` found for these arguments before, which the node's `meta` keeps."""
        known: dict[Any, _Result] = node.meta
        key = name, args
        try:
            return known[key]
        except KeyError:
            found = known[key] = function(node, *args)
            return found

    return recalled


@remembered
def cost_of(node: fx.Node) -> OperatorCost:
    """Return the work of a node of an ATen graph; views are free."""
    value = node.meta.get("val")
    inputs = [source.meta.get("val") for source in node.all_input_nodes]
    flops, rows = _flops(node, value)
    return OperatorCost(
        flops=flops,
        moved_bytes=bytes_of(value) + sum(map(bytes_of, inputs)),
        rows=rows,
        is_free=is_view(node),
        name=short_name(str(node.target)),
        elements=max(elements_of(value), sum(map(elements_of, inputs))),
    )


def short_name(name: str) -> str:
    """Return `tanh` of `aten.tanh_.default`."""
    return name.split(".")[1].removesuffix("_") if name.count(".") > 1 else name


@remembered
def is_view(node: fx.Node) -> bool:
    """Return whether the result of a node lies on the memory of an input."""
    if node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.returns:
        return False
    alias = schema.returns[0].alias_info
    return (alias is not None and not alias.is_write) or node.target in {
        _aten._unsafe_view.default,  # noqa: SLF001 (the operator's name)
        _aten.reshape.default,
    }


def tensors_of(node: fx.Node) -> Sequence[Tensor]:
    """Return the fake tensors among the results of a node."""
    return [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]


def bytes_of(value: Any) -> int:
    """Return the bytes that the elements of all tensors in `value` need."""
    tensors = [value] if isinstance(value, Tensor) else tree_leaves(value)
    return sum(each.numel() * each.element_size() for each in tensors if isinstance(each, Tensor))


def elements_of(value: Any) -> int:
    """Return the elements of all tensors in `value`."""
    return sum(each.numel() for each in tree_leaves(value) if isinstance(each, Tensor))


def outer_sizes_of(function: Any, operands: Sequence[Any], result: Any) -> tuple[int, ...]:
    """Return the outer sizes of a matrix product, attention or convolution; none of other operators.

    The smallest of them, its rows, limits the speed of a product.

    Args:
        operands: its positional arguments.
    """
    if function in _MATRICES:
        left, right = (operands[position].shape for position in _MATRICES[function])
        return int(left[-2]), int(right[-1])
    if function in _ATTENTIONS:
        return (int(operands[0].shape[2]),)
    if function is _aten.convolution.default and isinstance(result, Tensor):
        return (result.numel() // max(1, result.shape[1]),)
    return ()


def _flops(node: fx.Node, value: Any) -> tuple[int, int]:
    """Return FLOPs of what multiplies (0 of all else), and rows of products, attention and convolutions."""
    operands: list[Any] = [each.meta["val"] if isinstance(each, fx.Node) else each for each in node.args]
    rows = min(outer_sizes_of(node.target, operands, value), default=0)
    if node.target in _MATRICES:
        left, right = (operands[position].shape for position in _MATRICES[node.target])
        return 2 * prod(left) * right[-1], rows
    if node.target in _ATTENTIONS:
        return 4 * prod(operands[0].shape) * operands[1].shape[2], rows
    if node.target is _aten.convolution.default and isinstance(value, Tensor):
        return 2 * value.numel() * prod(operands[1].shape[1:]), rows
    kwargs = {
        name: each.meta["val"] if isinstance(each, fx.Node) else each for name, each in node.kwargs.items()
    }
    return (
        (flops_of(node.target, tuple(operands), kwargs, value), 0) if has_own_formula(node.target) else (0, 0)
    )
