"""Sharding candidates of a linear layer: the door that programs outside use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from strategies.estimate.machine import A100, Machine
from strategies.shard.candidates import enumeration
from strategies.shard.candidates.enumeration import Mode
from strategies.shard.candidates.operation import UNCHANGED, OperandType
from strategies.shard.candidates.sharding_candidate import ShardingCandidate
from strategies.shard.operators.matrix_products import linear


def candidates(
    input_shape: Sequence[int],
    out_features: int,
    mesh_shape: Sequence[int],
    mode: Mode = "classic",
    *,
    bias: bool = True,
    weight_type: OperandType = "param",
    bias_type: OperandType = "param",
    dtype: torch.dtype = torch.float32,
    dtypes: Mapping[str, torch.dtype] = UNCHANGED,
    machine: Machine = A100,
) -> tuple[ShardingCandidate, ...]:
    """Return the sharding candidates of a linear layer, full replication first.

    The arguments are those of `matrix_products.linear`, `Operation.typed` and `enumeration.candidates`.

    Raises:
        StrategyError: a shape or the mode is invalid.
    """
    types = {"weight": weight_type, "bias": bias_type}
    operation = linear(input_shape, out_features, bias=bias).typed(dtype, dtypes=dtypes, types=types)
    return enumeration.candidates(operation, mesh_shape, mode, machine=machine)
