"""Enumeration: an operator's candidates, all of them or those that the peer has too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from strategies.errors import StrategyError
from strategies.shard.candidates.candidate import Candidate
from strategies.shard.candidates.cost import Hardware
from strategies.shard.candidates.derivation import DEFAULT_HARDWARE, derive
from strategies.shard.candidates.layout import Shape
from strategies.shard.candidates.operation import Choice, Operation

Mode: TypeAlias = Literal["classic", "complete"]
"""The peer's set, or every choice that cuts evenly."""
Rule: TypeAlias = Callable[[tuple[Choice, ...]], bool]
"""Whether the peer has the choices of the axes of more than one rank."""


def has_all(_used: tuple[Choice, ...]) -> bool:
    """Be the rule of operators of which the peer misses nothing."""
    return True


def enumerate_candidates(
    operation: Operation,
    mesh_shape: Shape,
    mode: Mode,
    *,
    name: Callable[[Operation, tuple[Choice, ...]], str],
    is_classic: Rule = has_all,
    hardware: Hardware = DEFAULT_HARDWARE,
) -> tuple[Candidate, ...]:
    """Return the candidates of `operation`; never fewer than one, which is full replication.

    Args:
        operation: the operator.
        mesh_shape: sizes of the mesh axes.
        mode: `classic` or `complete`.
        name: names a candidate.
        is_classic: the rule of mode `classic`.
        hardware: what costs are reckoned on.

    Raises:
        StrategyError: the mode is none.
    """
    if mode not in ("classic", "complete"):
        raise StrategyError("mode", f"must be classic or complete, got {mode!r}")
    possible = tuple(operation.choices(mesh_shape))
    wanted = [each for each in possible if mode == "complete" or is_classic(_used(each, mesh_shape))]
    return tuple(
        derive(operation, choices, mesh_shape, name=name(operation, choices), hardware=hardware)
        for choices in wanted or possible[:1]
    )


def _used(choices: tuple[Choice, ...], mesh_shape: Shape) -> tuple[Choice, ...]:
    return tuple(choice for choice, ranks in zip(choices, mesh_shape, strict=True) if ranks > 1)
