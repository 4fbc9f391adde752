"""A region that loses autocast, and a save list on a tied weight, checked as people train in mixed precision.

Two public reports. Training enters autocast around forward and loss; backward runs outside of it. The recipe
of the page was to wrap the check, which put backward and optimizer under autocast too: it found the first
neutral but for a leak that is none, and the second neutral, although training raises.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.gallery.outside._checked import checked

BEFORE = "wrapped: leak and neutral; with autocast=: none"
RIGHT = "wrapped: refused and refused; with autocast=: gradients and recomputation"

_WIDTH = 8
_BF16: Any = {"autocast": torch.bfloat16}


class _Forgetful(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: Any, x: Tensor) -> Any:
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block.inner(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            outputs = ctx.block.inner(x)
        torch.autograd.backward(outputs, gradient.to(outputs.dtype))
        return None, x.grad


class _Block(nn.Module):
    is_on = False

    def __init__(self, shared: nn.Linear | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, _WIDTH), shared or nn.Linear(_WIDTH, _WIDTH)

    def inner(self, x: Tensor) -> Tensor:
        outputs: Tensor = x + self.down(self.up(x).tanh()).sin().float()
        return outputs

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = _Forgetful.apply(self, x) if self.is_on else self.inner(x)
        return outputs


def answer() -> str:
    """Return what the check says of both within autocast, and with `autocast=`."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wrapped = " and ".join((_said(_plain, _forget), _said(tied, keep_products)))
    try:
        told = " and ".join((_said(_plain, _forget, **_BF16), _said(tied, keep_products, **_BF16)))
    except TypeError:
        told = "none"
    return f"wrapped: {wrapped}; with autocast=: {told}"


def _said(make: Any, variant: Any, **options: Any) -> str:
    found = checked(make, (torch.sin(torch.arange(48.0)).view(6, _WIDTH),), variant, **options)
    if isinstance(found, ValueError):
        return "refused"
    return str(found.first["part"] if found.first else found.verdict)


def _plain() -> nn.Module:
    return nn.Sequential(nn.Linear(_WIDTH, _WIDTH), *(_Block() for _ in range(2)))


def tied() -> nn.Module:
    """Return three blocks with one weight."""
    shared = nn.Linear(_WIDTH, _WIDTH)
    return nn.Sequential(*(_Block(shared) for _ in range(3)))


def _forget(model: nn.Sequential) -> None:
    for block in model:
        if isinstance(block, _Block):
            block.is_on = True


def keep_products(model: nn.Sequential) -> None:
    """Checkpoint each block with torch's save list of matrix products."""
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    for block in model:
        region: Any = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
        block.forward = region
