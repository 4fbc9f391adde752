"""Acts of training code between forward and backward of a step: an evaluation, and drawing numbers."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from harness.models.base import Batch


def interlude(model: nn.Module, evaluate: Callable[[], object], device: torch.device) -> None:
    """Evaluate the model once, and draw a number from each generator that a model may draw from.

    Args:
        model: model of the step; its modules are in the modes in which they were, afterwards.
        evaluate: calls the model on inputs.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            evaluate()
    finally:
        for module, mode in modes.items():
            module.training = mode
    torch.rand((), device=device)
    random.random()  # noqa: S311 (as training code does)
    np.random.rand()  # noqa: NPY002 (as above)


def smaller(given: Batch) -> list[Batch]:
    """Return smaller micro-batches made of `given`, smallest first, and at last `given` itself.

    Cut are rows, and the second dimension too where tokens have one and all tensors of more than one
    dimension share it. A model need not take what is cut.
    """
    rows, columns = _shared(given, 0), _shared(given, 1)
    found = []
    if rows > 1 and columns > 1 and _has_integers(given):
        found.append(_cut(given, rows - rows // 2, columns // 2))
    if rows > 1:
        found.append(_cut(given, rows - rows // 2, None))
    return [*found, given]


def turned(given: Batch) -> Batch:
    """Return a batch of the same sizes and kinds of values: each last dimension runs backwards."""

    def turn(tensor: Tensor) -> Tensor:
        return tensor.detach().flip(-1 if tensor.dim() else ()).requires_grad_(tensor.requires_grad)

    return given.changed(turn)


def _tensors(given: Batch) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves((given.inputs, dict(given.keywords), given.targets))  # noqa: SLF001 (no public name)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _shared(given: Batch, dimension: int) -> int:
    """Return the size of a dimension in all tensors that have it; 0 where they do not agree."""
    sizes = {tensor.size(dimension) for tensor in _tensors(given) if tensor.dim() > dimension}
    return sizes.pop() if len(sizes) == 1 else 0


def _has_integers(given: Batch) -> bool:
    return any(tensor.dtype is torch.int64 and tensor.dim() > 1 for tensor in _tensors(given))


def _cut(given: Batch, rows: int, columns: int | None) -> Batch:
    def cut(tensor: Tensor) -> Tensor:
        share = tensor.detach()[:rows] if tensor.dim() else tensor.detach()
        if columns is not None and tensor.dim() > 1:
            share = share[:, :columns]
        return share.clone().requires_grad_(tensor.requires_grad)

    return given.changed(cut)
