"""Losses of rows in the memory of their scores.

Autograd would keep log-probabilities and make two gradients of their size in backward. Where a chunk makes
its scores itself, and only the loss takes the logarithm of their softmax, it needs that memory once:
log-probabilities lie over the scores, and the gradient of the scores over the log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.function import once_differentiable

from strategies.chunk.flow.chunk_rules import slots
from strategies.estimate.operator_cost import is_view

_aten = torch.ops.aten
_MAKERS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.clone.default,
        _aten._to_copy.default,  # noqa: SLF001 (the operator's name)
    }
)
"""Operators whose backward does not need their result."""
_BY_A_NUMBER = frozenset({_aten.mul.Tensor, _aten.div.Tensor})
"""The same of those whose second operand is a number."""


def overwritten_scores(loss: fx.Node, is_inside: Callable[[fx.Node], bool]) -> list[fx.Node] | None:
    """Return the chain of values from scores to a loss for each row, if they can share one memory.

    Args:
        is_inside: whether the body of a loop makes a value, and nobody outside of it takes this.

    Returns:
        The logarithm of the softmax, the scores, and what these are views of, in this order; `None` where
        `loss` is another operator, or somebody else may read one of them.
    """
    if loss.target is not _aten.nll_loss_forward.default or loss.args[3] != 0:
        return None
    chain = [slots(loss)[0]]
    if chain[0].target is not _aten._log_softmax.default or chain[0].args[2]:  # noqa: SLF001
        return None
    chain.append(slots(chain[0])[0])
    while is_view(chain[-1]) and len(slots(chain[-1])) == 1:
        chain.append(slots(chain[-1])[0])
    scores: Tensor = chain[1].meta["val"]
    is_private = all(is_inside(each) and len(each.users) == 1 for each in chain)
    is_part = all(user.args[1] == 0 for user in loss.users)
    is_matrix = scores.dim() == 2 and scores.is_contiguous()  # noqa: PLR2004
    return chain if is_private and is_part and is_matrix and _forgets_its_result(chain[-1]) else None


def _forgets_its_result(node: fx.Node) -> bool:
    return node.target in _MAKERS or (node.target in _BY_A_NUMBER and len(slots(node)) == 1)


def log_softmax_over(scores: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Return the logarithm of the softmax of scores in their memory: kernels read a row before they write."""
    result: Tensor = _aten._log_softmax.out(scores, dim, half_to_float, out=scores)  # noqa: SLF001
    return result


def row_losses(
    scores: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int
) -> tuple[Tensor]:
    """Return what `nll_loss_forward` gives of the logarithm of a softmax of `scores`, whose memory it takes.

    Args:
        scores: matrix of (rows, classes).
        target, weight, reduction, ignored: as the operator has them; `reduction` is 0, a loss for each row.
    """
    losses: Tensor = _RowLosses.apply(scores, target, weight, reduction, ignored)  # type: ignore[no-untyped-call]
    return (losses,)


class _RowLosses(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 (autograd passes operands by position)
        ctx: Any, scores: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int
    ) -> Tensor:
        """Return the losses of rows, and save the scores rather than their logarithms."""
        logarithms = log_softmax_over(scores.detach(), 1, half_to_float=False)
        losses, _ = _aten.nll_loss_forward.default(logarithms, target, weight, reduction, ignored)
        ctx.save_for_backward(scores, target, weight)
        ctx.ignored = ignored
        result: Tensor = losses
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradient of the scores: softmax less the target's one, times the factor of the row."""
        logarithms, target, weight = ctx.saved_tensors
        counted = target.ne(ctx.ignored)
        classes = target.where(counted, 0)
        factors = (gradient if weight is None else gradient * weight[classes]).where(counted, 0.0)
        scores = logarithms.detach().exp_().mul_(factors.unsqueeze(1))
        scores.scatter_add_(1, classes.unsqueeze(1), -factors.unsqueeze(1))
        return scores, None, None, None, None
