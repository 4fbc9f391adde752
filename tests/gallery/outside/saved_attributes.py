"""An autograd function reads in backward an attribute that Python has set on a tensor that it saved.

Found with a test of torch for its own checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from strategies import Strategy
from strategies.ac.full import Full
from strategies.ac.nested import Nested
from strategies.ac.offload import Offload

BEFORE = "full 5, full with offload 1, full reentrant 1, nested 1, offload 1"
RIGHT = "full 5, full with offload 5, full reentrant 5, nested 5, offload 5"


class Gained(torch.autograd.Function):
    """Hands its input on, with a gradient as many times as large as the saved tensor says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        """Return a copy of `x`."""
        ctx.save_for_backward(factor)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of `x`."""
        return gradients[0] * getattr(ctx.saved_tensors[0], "gain", 1.0), None


class Block(nn.Module):
    """A block that calls the function."""

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        y: Tensor = Gained.apply(x, factor)  # type: ignore[no-untyped-call]
        return y


class Model(nn.Module):
    """One block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        """Return what the block makes."""
        y: Tensor = self.blocks[0](x, factor)
        return y


def answer() -> str:
    """Return the gradient under each variant."""
    variants: dict[str, Strategy] = {
        "full": Full(layers_fqn="blocks"),
        "full with offload": Full(layers_fqn="blocks", offload=True),
        "full reentrant": Full(layers_fqn="blocks", use_reentrant=True),
        "nested": Nested(layers_fqn="blocks", levels=[1]),
        "offload": Offload(layers_fqn="blocks"),
    }
    return ", ".join(f"{name} {_gradient(variant):g}" for name, variant in variants.items())


def _gradient(variant: Strategy) -> float:
    x, factor = torch.ones((), requires_grad=True), torch.ones(())
    vars(factor)["gain"] = 5.0
    variant.apply(Model())(x, factor).backward()
    assert x.grad is not None
    return x.grad.item()
