"""Enumeration: an operator's candidates on a mesh, all of them or those that ColossalAI has too."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Literal, TypeAlias

from strategies.base import StrategyError
from strategies.estimate.machine import A100, Machine
from strategies.shard.candidates.derivation import derive
from strategies.shard.candidates.layout import checked_shape
from strategies.shard.candidates.operation import Operation
from strategies.shard.candidates.sharding_candidate import ShardingCandidate

Mode: TypeAlias = Literal["classic", "complete"]
"""ColossalAI's set, or every choice that cuts evenly."""


def candidates(
    operation: Operation,
    mesh_shape: Sequence[int],
    mode: Mode = "classic",
    *,
    machine: Machine = A100,
) -> tuple[ShardingCandidate, ...]:
    """Return the sharding candidates of an operator; the first is full replication, if the mode has it.

    What cannot be cut evenly is in neither mode, and an axis of size 1 replicates everything. Where
    ColossalAI has no candidate at all, `classic` is full replication.

    Args:
        operation: the operator, as a function of `strategies.shard.operators` describes it.
        mesh_shape: sizes of the mesh axes, each >= 1.
        mode: `classic` for the set of ColossalAI; `complete` for every choice.
        machine: speed of a rank, by which costs are reckoned.

    Raises:
        StrategyError: the mesh has no axes, or the mode is neither of the two.
    """
    mesh = checked_shape("mesh_shape", mesh_shape)
    if mode not in ("classic", "complete"):
        raise StrategyError("mode", f"must be classic or complete, got {mode!r}")
    possible = tuple(operation.choices(mesh))
    wanted, is_classic = possible, operation.is_classic
    if mode == "classic" and is_classic is not None:
        has_several = [size > 1 for size in mesh]
        wanted = tuple(each for each in possible if is_classic(tuple(compress(each, has_several))))
    return tuple(
        derive(operation, choices, mesh, name=operation.naming(operation, choices), machine=machine)
        for choices in wanted or possible[:1]
    )
