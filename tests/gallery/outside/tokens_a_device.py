"""Predicted tokens/s of a device are asked for on one, two and four devices that share a batch.

The number was that of the whole job, under a legend that said "of a device".
"""

from __future__ import annotations

import json
from math import prod
from typing import Any

from tests.gallery.outside._commands import acbench_plan

BEFORE = "1, 2 and 4 times those of a device"
RIGHT = "1, 1 and 1 times those of a device"


def answer() -> str:
    """Return by how much the tokens/s exceed a device's share of the step's tokens in the step's time."""
    said = acbench_plan("-m", "mesh=single,ddp2,shard4", "hardware=h100", "--json").stdout
    excess = [round(_excess(record)) for record in json.loads(said)]
    return f"{excess[0]}, {excess[1]} and {excess[2]} times those of a device"


def _excess(record: dict[str, Any]) -> float:
    experiment, time = record["experiment"], record["time"]
    ranks = prod(experiment["mesh"][each] for each in ("dp_replicate", "dp_shard", "tp"))
    tokens = experiment["batch_size"] * experiment["sequence_length"]
    excess: float = time["tokens_per_s"] * time["step_time_s"]["median"] * ranks / tokens
    return excess
