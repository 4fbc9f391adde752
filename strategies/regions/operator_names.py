"""Operators by name: what groups, exact overloads and presets of selective-op AC stand for in this torch.

A name resolves to the overloads of it that this build of torch has. Only exact overloads take part,
because a policy on an operator packet (`aten.mm`) silently never matches
(https://github.com/pytorch/pytorch/issues/176065).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from strategies.base import StrategyError
from strategies.regions.presets import GROUPS, PRESETS, check_count, check_names

Operator: TypeAlias = OpOverload | HigherOrderOperator


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveList:
    """Operators whose outputs selective-op AC saves.

    Fields:
        save_ops: what the user wrote: the name of a preset, or names of groups and overloads.
        entries: each of those names, or of the preset's operators, with the operators it stands for.
        counted: the matmuls that `recompute_every` counts.
        recompute_every: every how many counted matmuls one is recomputed; 0 is never.
    """

    save_ops: str | tuple[str, ...]
    entries: Mapping[str, frozenset[Operator]]
    counted: frozenset[Operator]
    recompute_every: int

    @property
    def named(self) -> tuple[str, ...]:
        """The names of the entries; of a preset every operator, so that each can be seen to fire."""
        return tuple(self.entries)

    @property
    def operators(self) -> frozenset[Operator]:
        """All operators of all entries."""
        return frozenset().union(*self.entries.values())

    def __reduce__(self) -> tuple[Any, ...]:
        return resolve, (self.save_ops, self.recompute_every)  # operators cannot be pickled; names can

    def entries_of(self, operator: Operator) -> tuple[str, ...]:
        """Return the entries that `operator` belongs to."""
        return tuple(name for name, operators in self.entries.items() if operator in operators)


def resolve(save_ops: str | tuple[str, ...], matmul_recompute_every: int | None) -> SaveList:
    """Return the operators behind `save_ops`: a preset's name, or groups and exact overloads.

    Args:
        matmul_recompute_every: 0 never, k >= 2 every k-th saved matmul; `None` as the preset says, else 0.

    Raises:
        StrategyError: empty, unknown, an operator packet, an operator that writes to its input;
            every matmul recomputed, or a count with no matmul to count.
    """
    check_names(save_ops, matmul_recompute_every)
    if isinstance(save_ops, str):
        return _from_preset(save_ops, matmul_recompute_every)
    entries = {name: _operators(name) for name in save_ops}
    matmuls = _present(GROUPS["matmul"])
    counted = matmuls & frozenset().union(*entries.values())
    every = matmul_recompute_every or 0
    check_count(every, has_matmul=bool(counted))
    return SaveList(save_ops=save_ops, entries=entries, counted=counted, recompute_every=every)


def _from_preset(name: str, matmul_recompute_every: int | None) -> SaveList:
    preset = PRESETS[name]
    every = preset.recompute_every if matmul_recompute_every is None else matmul_recompute_every
    entries = {operator: _present((operator,)) for operator in preset.operators}
    counted = _present(preset.counted)
    return SaveList(save_ops=name, entries=entries, counted=counted, recompute_every=every)


def _operators(name: str) -> frozenset[Operator]:
    """Return the operators of a name in a save list, or refuse it with what it should be.

    The name may stand behind the module whose operators are meant: `layers.*.mlp::aten.mm.default`.
    """
    name = name.rpartition("::")[2]
    if name in GROUPS:
        return _present(GROUPS[name])
    found = _lookup(name)
    if found is None:
        raise StrategyError("ac.save_ops", f"{name!r} is no group and no operator; {_suggestion(name)}")
    if isinstance(found, OpOverloadPacket):
        overloads = ", ".join(
            f"{found}.{overload}" for overload in found.overloads() if _is_functional(found, overload)
        )
        problem = f"{name!r} is an operator packet, which never matches"
        raise StrategyError("ac.save_ops", f"{problem}; its overloads are: {overloads}")
    if isinstance(found, OpOverload) and found._schema.is_mutable:  # noqa: SLF001 (torch has no public schema)
        problem = f"{name!r} writes to its inputs, which saving would skip"
        raise StrategyError("ac.save_ops", f"{problem}; name an operator that does not")
    return frozenset({found})


def _present(names: tuple[str, ...]) -> frozenset[Operator]:
    found = (_lookup(name) for name in names)
    return frozenset(operator for operator in found if isinstance(operator, Operator))


def _lookup(name: str) -> Operator | OpOverloadPacket | None:
    """Return what `torch.ops.<name>` is, `None` where torch has nothing of that name."""
    namespace, _, path = name.removeprefix("torch.ops.").partition(".")
    found = getattr(torch.ops, namespace) if namespace.isidentifier() and path else None
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, OpOverload | HigherOrderOperator | OpOverloadPacket) else None


def _is_functional(packet: OpOverloadPacket, overload: str) -> bool:
    return not getattr(packet, overload)._schema.is_mutable  # noqa: SLF001 (torch has no public schema)


def _suggestion(name: str) -> str:
    short = name.removeprefix("torch.ops.")
    known = [*GROUPS, *(op for group in GROUPS.values() for op in group)]
    close = difflib.get_close_matches(short, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}groups are: {', '.join(GROUPS)}; an operator is written as aten.mm.default"
