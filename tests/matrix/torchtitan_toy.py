"""torchtitan's toy: three bias-free matmuls whose result is summed inside of the block.

Source: https://github.com/pytorch/torchtitan, tests/unit_tests/test_activation_checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Matmuls of 512 to 512, 512 to 512 and 512 to 1024."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(512, 512, bias=False)
        self.wq = nn.Linear(512, 512, bias=False)
        self.output = nn.Linear(512, 1024, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.output(self.wq(self.gate(x)))
        return outputs.sum()


class Toy(nn.Module):
    """One block under `layers`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block()])

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layers[0](x)
        return outputs


def toy() -> tuple[nn.Module, tuple[Tensor], Callable[[Tensor], Tensor]]:
    """Return the model, its input and its loss, for `model=python`."""
    return Toy(), (torch.randn(512, 512, requires_grad=True),), lambda outputs: outputs
