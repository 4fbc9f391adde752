"""`ac=budget` gets the second name of a ModuleList that is registered twice."""

from __future__ import annotations

import torch
from torch import nn

from strategies.ac.budget import Budget

BEFORE = "KeyError: 'blocks'"
RIGHT = "equal gradients"


class Net(nn.Module):
    """Four residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of `x`, (B, 16)."""
        for block in self.blocks:
            x = x + block(x)
        return x


class Wrapper(nn.Module):
    """A model that gives the blocks of another one a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.blocks = self.net.blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the other model gives."""
        outputs: torch.Tensor = self.net(x)
        return outputs


def answer() -> str:
    """Train a step with and without a plan."""
    x = torch.randn(64, 16)
    plain, planned = Wrapper(), Wrapper()
    try:
        Budget(fraction=0.9, layers_fqn="blocks").apply(planned)
        for model in (plain, planned):
            model(x).sum().backward()
    except KeyError as error:
        return f"KeyError: {error}"
    pairs = zip(plain.parameters(), planned.parameters(), strict=True)
    are_equal = all(torch.equal(one.grad, two.grad) for one, two in pairs)  # type: ignore[arg-type]
    return RIGHT if are_equal else "other gradients"
