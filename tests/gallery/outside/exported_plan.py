"""A plan is exported as a file for torch alone, and trains in settings other than that of the plan.

The file named operators by number and kernel: it raised under autocast, with dropout, where attention runs as
products, and on every GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from strategies.ac.budget import Budget

BEFORE = "as planned: equal; bf16 autocast: raises; dropout: raises; attention as products: raises"
RIGHT = "as planned: equal; bf16 autocast: equal; dropout: equal; attention as products: equal"


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.Dropout(dropout))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of shape (B, S, 32)."""
        queries, keys, values = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(queries, keys, values, dropout_p=self.dropout)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y: Tensor = x + self.mlp(x)
        return y


def answer() -> str:
    """Return what becomes of the file in each setting."""
    view = "file" if "file" in Budget.views else "policy"
    planned = Budget(layers_fqn="0", fraction=0.7)
    text = planned.view(view, _model(0.0), (torch.zeros(4, 64, 32),))
    settings: dict[str, tuple[float, Callable[[], AbstractContextManager[Any]]]] = {
        "as planned": (0.0, nullcontext),
        "bf16 autocast": (0.0, lambda: torch.autocast("cpu", torch.bfloat16)),
        "dropout": (0.1, nullcontext),
        "attention as products": (0.0, lambda: sdpa_kernel(SDPBackend.MATH)),
    }
    return "; ".join(f"{name}: {_compared(text, *setting)}" for name, setting in settings.items())


def _model(dropout: float) -> nn.Module:
    return nn.Sequential(nn.Sequential(*(Block(dropout) for _ in range(3))), nn.Linear(32, 8))


def _compared(text: str, dropout: float, around: Callable[[], AbstractContextManager[Any]]) -> str:
    names: dict[str, Any] = {"__name__": "apply_plan"}
    exec(compile(text, "apply_plan", "exec", dont_inherit=True), names)
    found = []
    for apply in (lambda model: model, names["apply"]):
        torch.manual_seed(0)
        model = apply(_model(dropout))
        x = torch.randn(4, 64, 32)
        with around():
            try:
                model(x).float().square().mean().backward()
            except RuntimeError:
                return "raises"
        found.append([parameter.grad for parameter in model.parameters()])
    return "equal" if all(map(torch.equal, *found)) else "differs"
