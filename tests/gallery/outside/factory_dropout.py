"""A factory with `dropout=0.1` is run without `model.dropout`, under a checkpoint that loses random state.

The factory got 0.0 instead of its own default, so the checkpoint looked harmless, and no record said so.
"""

from __future__ import annotations

from pathlib import Path

from tests.gallery.outside._commands import acbench, records

BEFORE = "neutral"
RIGHT = "differs"

_FACTORY = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Dropout(dropout)) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def make(dropout=0.1):
    return Net(dropout), (torch.randn(8, 64),), lambda outputs: outputs.square().mean()
"""


def answer() -> str:
    """Return the verdict."""
    Path("factory.py").write_text(_FACTORY)
    acbench(
        "model=python", "model.factory=factory:make", "model.layers_fqn=blocks", "ac=full",
        "ac.preserve_rng_state=false", "protocol=parity", "tracker=none", "name=case",
    )  # fmt: skip
    return str(records("case")[0]["verdict"])
