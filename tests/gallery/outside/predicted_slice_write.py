"""Predict six times a model of attention layers whose factory writes to slices of an example input.

Every run ended by a corrupt heap: the layers of the encoder are deep copies, and each copied the mode of its
tensors.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.gallery.outside._commands import acbench_plan

BEFORE = "0 of 6 predicted"
RIGHT = "6 of 6 predicted"

_RUNS = 6
_MODEL = """
import torch
from torch import nn

class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
        self.fusion = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x, hidden):
        return self.fusion(x, src_key_padding_mask=hidden)

def make():
    hidden = torch.zeros(4, 48, dtype=torch.bool)
    for first in range(0, 48, 4):
        hidden[:, first:] = 0
    return Masked(), (torch.randn(4, 48, 64), hidden), lambda outputs: outputs.square().mean()
"""


def answer() -> str:
    """Return how many runs of `acbench-plan` end in a prediction."""
    Path("masked.py").write_text(_MODEL)
    words = "model=python", "model.factory=masked:make", "model.layers_fqn=fusion.layers", "ac=full", "--json"
    predicted = sum(_status(acbench_plan(*words).stdout) == "predicted" for _ in range(_RUNS))
    return f"{predicted} of {_RUNS} predicted"


def _status(said: str) -> str:
    return str(json.loads(said)[0]["status"]) if said else "ended"
