"""Networks that are no transformers, on which plans are hard: factories for `model=python`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Residual(nn.Module):
    """`x + body(x)`, or `x * body(x)`."""

    def __init__(self, *body: nn.Module, gates: bool = False) -> None:
        super().__init__()
        self.body, self.gates = nn.Sequential(*body), gates

    def forward(self, x: Tensor) -> Tensor:
        """Return both joined."""
        y: Tensor = self.body(x)
        return x * y if self.gates else x + y


class Pointwise(nn.Module):
    """A function of each element."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Return the function of `x`."""
        return self.function(x)


class Outer(nn.Module):
    """The outer product of each row with itself."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, D * D) from (B, D)."""
        return (x[..., :, None] * x[..., None, :]).flatten(-2)


class Blocks(nn.Module):
    """A stem, and blocks one after another."""

    def __init__(self, stem: nn.Module, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.stem, self.blocks = stem, nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the last block."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def loss(outputs: Tensor) -> Tensor:
    """Return the mean square."""
    return outputs.float().square().mean()


def funnel() -> Any:
    """Return blocks of other widths each, which save their outputs."""
    widths = (32, 96, 64, 128, 48, 160, 32)
    blocks: list[nn.Module] = [
        nn.Sequential(
            Residual(nn.Linear(a, 2 * b), nn.GELU(), nn.Linear(2 * b, a)), nn.Linear(a, b), nn.Tanh()
        )
        for a, b in pairwise(widths)
    ]
    return Blocks(nn.Linear(32, 32), blocks), (torch.randn(256, 32),), loss


def convskip() -> Any:
    """Return convolutions with gates and skips."""
    blocks: list[nn.Module] = [
        Residual(
            nn.Conv1d(16, 16, 3, padding=1),
            nn.ReLU(),
            Residual(nn.Conv1d(16, 32, 3, padding=1), nn.SiLU(), nn.Conv1d(32, 16, 3, padding=1), gates=True),
            nn.GELU(),
        )
        for _ in range(5)
    ]
    return Blocks(nn.Conv1d(16, 16, 1), blocks), (torch.randn(32, 16, 64),), loss


def outer_products() -> Any:
    """Return blocks whose largest values are outer products, which cost little."""
    blocks: list[nn.Module] = [
        Residual(nn.Linear(24, 12), nn.Tanh(), Outer(), Pointwise(torch.sin), nn.SiLU(), nn.Linear(144, 24))
        for _ in range(5)
    ]
    return Blocks(nn.Linear(24, 24), blocks), (torch.randn(384, 24),), loss


def cheap_chains() -> Any:
    """Return blocks of many operators without FLOPs."""
    cheap: tuple[Callable[[Tensor], Tensor], ...] = (
        torch.sin,
        torch.exp,
        torch.tanh,
        torch.sigmoid,
        functional.gelu,
        torch.cos,
    )
    blocks: list[nn.Module] = [
        nn.Sequential(
            nn.Linear(48, 48),
            Residual(*map(Pointwise, cheap), gates=True),
            Residual(nn.Linear(48, 192), nn.Sigmoid(), nn.Linear(192, 48)),
        )
        for _ in range(4)
    ]
    return Blocks(nn.Linear(48, 48), blocks), (torch.randn(256, 48),), loss


def uneven() -> Any:
    """Return blocks of one to six times the width."""
    blocks: list[nn.Module] = [
        Residual(
            nn.Linear(40, k * 40),
            nn.GELU(),
            Residual(nn.Linear(k * 40, k * 40), nn.Sigmoid(), gates=True),
            nn.Linear(k * 40, 40),
        )
        for k in (1, 6, 2, 4, 1, 3)
    ]
    return Blocks(nn.Linear(40, 40), blocks), (torch.randn(256, 40),), loss
