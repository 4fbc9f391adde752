"""What the proofs of variants share: models, meshes and sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from harness.experiment.experiment import Experiment
from harness.records.record import Record

Run: TypeAlias = Callable[[Sequence[Experiment]], list[Record]]
"""Runs experiments of one mesh in one set of ranks."""
MODELS = ("gpt_nano", "llama_nano", "moe_nano", "mlp")
MESHES = ("single", "ddp2", "shard2", "tp2", "shard2_tp2", "hsdp2x2")
DROPOUTS = (0.0, 0.1)
SIZES = (
    "model.n_layers=2",
    "model.width=32",
    "model.hidden_width=64",
    "data=synthetic",
    "batch_size=4",
    "sequence_length=16",
    "protocol=parity",
    "protocol.parity_steps=3",
)
