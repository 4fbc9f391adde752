"""The gated feed-forward of Llama and of its experts.

Source: Shazeer 2020, arXiv:2002.05202.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))`, bias-free; 6·D·F FLOPs a token."""

    def __init__(self, *, width: int, hidden_width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden_width, bias=False)
        self.up = nn.Linear(width, hidden_width, bias=False)
        self.down = nn.Linear(hidden_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (..., D)."""
        output: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return output
