"""Other parameters for one call by torch.func.functional_call, and backward outside of it.

The recomputation reads the module's own parameters by then, and gradients are of neither.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.func import functional_call

from strategies import Strategy, StrategyError
from strategies.ac.full import Full
from strategies.ac.nested import Nested
from strategies.ac.selective_op import SelectiveOp

BEFORE = "full wrong by 0.21, selective_op wrong by 0.25, nested refused"
RIGHT = "full refused, selective_op refused, nested refused"


class Model(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return what the second block makes."""
        y: Tensor = self.blocks[1](self.blocks[0](x))
        return y


def answer() -> str:
    """Return the relative error of the worst gradient under each variant."""
    plain = Model()
    others = {name: (1.1 * each).detach().requires_grad_() for name, each in plain.named_parameters()}
    truth = _gradients(plain, others)
    variants: dict[str, Strategy] = {
        "full": Full(layers_fqn="blocks"),
        "selective_op": SelectiveOp(layers_fqn="blocks", save_ops=("matmul",)),
        "nested": Nested(layers_fqn="blocks"),
    }
    return ", ".join(f"{name} {_told(each, plain, others, truth)}" for name, each in variants.items())


def _told(variant: Strategy, plain: nn.Module, others: dict[str, Tensor], truth: list[Tensor]) -> str:
    try:
        found = _gradients(variant.apply(copy.deepcopy(plain)), others)
    except StrategyError:
        return "refused"
    worst = max(float((a - b).norm() / a.norm()) for a, b in zip(truth, found, strict=True))
    return f"wrong by {worst:.2g}" if worst else "right"


def _gradients(model: nn.Module, others: dict[str, Tensor]) -> list[Tensor]:
    x = torch.linspace(-1, 1, 32).view(4, 8)
    loss = functional_call(model, others, (x,)).square().sum()
    return list(torch.autograd.grad(loss, list(others.values())))
