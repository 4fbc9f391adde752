"""Predict the saved bytes of LSTMs in nested regions.

A recurrent layer lists its weights in an attribute. Without data a parameter was not known for one there, and
its copy was counted as state that a region rewinds.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.gallery.outside._commands import acbench_plan

BEFORE = "31168 saved bytes"
RIGHT = "5056 saved bytes"

_MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.LSTM(16, 16, batch_first=True)

    def forward(self, x):
        return self.inner(x)[0]

class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def make():
    return Stack(), (torch.randn(4, 12, 16),), lambda outputs: outputs.square().mean()
"""


def answer() -> str:
    """Return the saved bytes that `acbench-plan` prints; a trial keeps one random state."""
    Path("stack.py").write_text(_MODEL)
    words = (
        "model=python",
        "model.factory=stack:make",
        "model.layers_fqn=blocks",
        "ac=nested",
        "mesh.device=cpu",
    )
    (record,) = json.loads(acbench_plan(*words, "--json").stdout)
    return f"{record['memory']['saved_bytes']} saved bytes"
