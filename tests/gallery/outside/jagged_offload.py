"""Blocks of jagged nested tensors under ac=offload: what is moved, and whether gradients are right.

Found with the models of https://github.com/pytorch/pytorch/issues/145837: nothing was moved, and the check
said that checkpointing never took place.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from strategies.ac.offload import Offload
from tests.gallery.outside._gradients import relative_error

BEFORE = "error 0, 0 bytes moved"
RIGHT = "error 0, 864 bytes moved"


class Jagged(nn.Module):
    """Two blocks of rows of three lengths."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

    def forward(self, values: Tensor) -> Tensor:
        """Return values of shape (9, 8)."""
        x = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 4, 6, 9]))
        for block in self.blocks:
            x = block(x)
        return x.values()


def answer() -> str:
    """Return the relative error of the worst gradient, and the bytes of one step."""
    offload, models = Offload(layers_fqn="blocks"), []

    def applied(model: nn.Module) -> nn.Module:
        models.append(offload.apply(model))
        return models[0]

    error = relative_error(Jagged(), (torch.sin(torch.arange(72.0)).view(9, 8),), applied)
    return f"error {error}, {offload.observe(models[0]).offloaded_bytes} bytes moved"
