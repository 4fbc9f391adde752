"""Sharding candidates of a linear layer: the door that programs outside use."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from strategies.estimate.machine import A100, Machine
from strategies.shard.candidates import enumeration
from strategies.shard.candidates.enumeration import Mode
from strategies.shard.candidates.operation import OperandType
from strategies.shard.candidates.sharding_candidate import ShardingCandidate
from strategies.shard.operators.matrix_products import linear


def candidates(
    input_shape: Sequence[int],
    out_features: int,
    mesh_shape: Sequence[int],
    mode: Mode = "classic",
    *,
    dtype: torch.dtype = torch.float32,
    machine: Machine = A100,
) -> tuple[ShardingCandidate, ...]:
    """Return the sharding candidates of a linear layer, full replication first.

    The arguments are those of `matrix_products.linear`, `Operation.typed` and `enumeration.candidates`.

    Raises:
        StrategyError: a shape or the mode is invalid.
    """
    types: dict[str, OperandType] = {"weight": "param", "bias": "param"}
    operation = linear(input_shape, out_features).typed(dtype, types=types)
    return enumeration.candidates(operation, mesh_shape, mode, machine=machine)
