"""Six linears, one behind the other: the case of ColossalAI's test of nested activation checkpoints."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

LABELS: dict[str, Any] = {
    "linear1": [0, 0, 0],
    "linear2": [0, 0, None],
    "linear3": [0, 0, 1],
    "linear4": [0, 1, None],
    "linear5": 1,
}


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for index in range(1, 7):
            setattr(self, f"linear{index}", nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x)
        return x
