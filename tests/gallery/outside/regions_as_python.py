"""The tape of a model that slices a mask is shown as code, which is parsed.

A slice was printed with an unbalanced bracket: `mask[slice(None, 8, None]`.
"""

from __future__ import annotations

import ast

import torch
from torch import Tensor, nn

from strategies.ac.nested import Nested

BEFORE = "SyntaxError"
RIGHT = "parses"


class Model(nn.Module):
    """Two layers, with a mask between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of shape (2, 8)."""
        y: Tensor = self.second(self.first(x)[:2])
        return y


def answer() -> str:
    """Return what becomes of the code."""
    shown = Nested(labels={"first": 0, "second": 0}).view("regions", Model(), (torch.randn(2, 8),))
    try:
        ast.parse(shown.partition("# forward of the model\n")[2])
    except SyntaxError as error:
        return type(error).__name__
    return "parses"
