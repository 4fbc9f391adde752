"""Gradients of a model without and with a variant, as a stranger compares them by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Model(nn.Module):
    """One block."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([block()])

    def forward(self, x: Tensor) -> Tensor:
        """Return what the block makes."""
        y: Tensor = self.blocks[0](x)
        return y


def relative_error(model: nn.Module, inputs: tuple[Any, ...], apply: Callable[[nn.Module], nn.Module]) -> str:
    """Return the error of the worst gradient of one step relative to its norm; the error that is raised.

    Args:
        model: the plain model.
        inputs: its positional inputs; its output is a tensor.
        apply: puts a variant on a copy of it.
    """
    truth = _gradients(model, inputs)
    try:
        found = _gradients(apply(copy.deepcopy(model)), inputs)
    except (RuntimeError, ValueError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return f"{max(float((a - b).norm() / a.norm()) for a, b in zip(truth, found, strict=True)):.2g}"


def _gradients(model: nn.Module, inputs: tuple[Any, ...]) -> list[Tensor]:
    torch.manual_seed(1)
    model(*inputs).square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
