"""Predict a model with batch norms whose factory gives example inputs.

A deep copy of the example copied the mode of its tensors, and with it weak references to storages that
nobody had taken: the process of the prediction ended by signal 11.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.gallery.outside._commands import acbench_plan

BEFORE = "refused: acbench-plan: harness.sweep.predictions:answers: the process that called it has ended"
RIGHT = "predicted"

_MODEL = """
import torch
from torch import nn

def make():
    blocks = (nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh()) for _ in range(3))
    return nn.Sequential(*blocks), (torch.randn(32, 16),), lambda outputs: outputs.square().mean()
"""


def answer() -> str:
    """Return the state of the record that `acbench-plan` prints."""
    Path("normed.py").write_text(_MODEL)
    (record,) = json.loads(
        acbench_plan(
            "model=python", "model.factory=normed:make", "ac=none", "mesh.device=cpu", "--json"
        ).stdout
    )
    return str(record["status"]) if record["error"] is None else f"refused: {record['error']['message']}"
