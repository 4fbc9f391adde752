"""Matrix products whose backward adds each chunk's gradient to the total in place.

Autograd would allocate, for each chunk, a second gradient as large as the weight, and then add it to the
total. These products add to the total at once, with `addmm_` and `baddbmm_`. One whose result nobody reads
need not be computed for that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_aten = torch.ops.aten


PRODUCTS = frozenset({_aten.mm.default, _aten.bmm.default, _aten.addmm.default})
"""Operators that `product` replaces where every chunk uses one operand whole."""


def product(*operands: Tensor) -> Tensor:
    """Return `left @ right` for matrices or batches of them, or `bias + left @ right` for matrices."""
    *biases, left, right = operands
    bias = biases[0] if biases else None
    totals = [_total(each) for each in (left, right)]
    if all(total is None for total in totals):
        return _multiplied(bias, left, right)
    result: Tensor = _Product.apply(bias, left, right, *totals, True)  # type: ignore[no-untyped-call]
    return result


def unread_product(*operands: Tensor) -> Tensor:
    """Return what has the shape and the gradients of `product(*operands)`; its elements say nothing."""
    *biases, left, right = operands
    totals = [_total(each) for each in (left, right)]
    bias = biases[0] if biases else None
    result: Tensor = _Product.apply(bias, left, right, *totals, False)  # type: ignore[no-untyped-call]
    return result


def _total(operand: Tensor) -> Tensor | None:
    """Return what the gradient of an operand is added to, where it has one already."""
    return operand.grad if operand.is_leaf and operand.requires_grad else None


def _multiplied(bias: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    if bias is not None:
        return torch.addmm(bias, left, right)
    return torch.mm(left, right) if left.dim() == 2 else torch.bmm(left, right)  # noqa: PLR2004 (a matrix)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 (autograd passes operands by position)
        ctx: Any,
        bias: Tensor | None,
        left: Tensor,
        right: Tensor,
        left_total: Tensor | None,
        right_total: Tensor | None,
        is_read: bool,
    ) -> Tensor:
        """Multiply where the result is read, and save the operands whose partners need gradients."""
        _, of_left, of_right, *_ = ctx.needs_input_grad
        ctx.save_for_backward(left if of_right else None, right if of_left else None)
        ctx.totals = left_total, right_total
        if is_read:
            return _multiplied(bias, left, right)
        return left.new_empty(()).expand(*left.shape[:-1], right.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Add the products of each chunk to the totals, where there are any."""
        left, right = ctx.saved_tensors
        of_left, of_right = ctx.totals
        gradients: list[Tensor | None] = [None] * 6
        if right is not None:
            gradients[1] = _added(of_left, gradient, right.transpose(-1, -2))
        if left is not None:
            gradients[2] = _added(of_right, left.transpose(-1, -2), gradient)
        if ctx.needs_input_grad[0]:
            gradients[0] = gradient.sum(0)
        return tuple(gradients)


def _added(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor | None:
    if total is None:
        return _multiplied(None, left, right)
    if total.dim() == 2:  # noqa: PLR2004 (a matrix)
        total.addmm_(left, right)
    else:
        total.baddbmm_(left, right)
    return None


def known(value: Tensor, made: Tensor) -> Tensor:
    """Return `value` where `made` has only its shape; gradients go to what `made` is made of."""
    result: Tensor = _Known.apply(value, made)  # type: ignore[no-untyped-call]
    return result


class _Known(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, made: Tensor) -> Tensor:  # noqa: ARG004 (as autograd calls it)
        """Return the value."""
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]  # noqa: ARG004
        """Return the gradient for what has the shape."""
        return None, gradient
