"""Operators by name: semantic groups, exact overloads and presets for selective-op AC.

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

from strategies.errors import StrategyError

Operator: TypeAlias = OpOverload | HigherOrderOperator

GROUPS: Mapping[str, tuple[str, ...]] = {
    "matmul": (
        "aten.mm.default",
        "aten.mm.dtype",
        "aten.addmm.default",
        "aten.addmm.dtype",
        "aten.bmm.default",
        "aten.bmm.dtype",
        "aten.linear.default",
        "aten._scaled_mm.default",
        "aten._scaled_mm_v2.default",
        "aten._grouped_mm.default",
        "aten._scaled_grouped_mm.default",
        "aten._scaled_grouped_mm_v2.default",
    ),
    "attention": (
        "aten.scaled_dot_product_attention.default",
        "aten._scaled_dot_product_attention_math.default",
        "aten._scaled_dot_product_attention_math_for_mps.default",
        "aten._scaled_dot_product_flash_attention.default",
        "aten._scaled_dot_product_flash_attention.quantized",
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "aten._scaled_dot_product_efficient_attention.default",
        "aten._scaled_dot_product_cudnn_attention.default",
        "aten._scaled_dot_product_fused_attention_overrideable.default",
        "aten._flash_attention_forward.default",
        "aten._flash_attention_forward.quantized",
        "aten._efficient_attention_forward.default",
        "aten._cudnn_attention_forward.default",
        "torch_attn._varlen_attn.default",
        "higher_order.flex_attention",
    ),
    "comm": (
        "_c10d_functional.all_gather_into_tensor.default",
        "_c10d_functional.all_gather_into_tensor_coalesced.default",
        "_c10d_functional.all_reduce.default",
        "_c10d_functional.all_reduce_coalesced.default",
        "_c10d_functional.all_to_all_single.default",
        "_c10d_functional.broadcast.default",
        "_c10d_functional.reduce_scatter_tensor.default",
        "_c10d_functional.reduce_scatter_tensor_coalesced.default",
    ),
    "max": ("aten.max.default", "aten.max.dim"),
    "topk": ("aten.topk.default",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A save list as another project ships it.

    Fields:
        operators: names of overloads; those this build of torch lacks never fire.
        counted: the matmuls among them that `recompute_every` counts.
        recompute_every: every how many counted matmuls one is recomputed; 0 is never.
    """

    operators: tuple[str, ...]
    counted: tuple[str, ...]
    recompute_every: int


PRESETS: Mapping[str, Preset] = {
    # SAVE_DICT of https://github.com/Modalities/modalities, activation checkpointing module
    "modalities": Preset(
        operators=(
            "aten.mm.default",
            "aten._scaled_dot_product_efficient_attention.default",
            "aten._scaled_dot_product_flash_attention.default",
            "_c10d_functional.reduce_scatter_tensor.default",
            "aten.max.default",
        ),
        counted=("aten.mm.default",),
        recompute_every=0,
    ),
    # https://github.com/pytorch/torchtitan, distributed/activation_checkpoint.py: the compute-intensive
    # operators of torch's partitioner, and what torchtitan adds; it counts mm and linear, never addmm
    "torchtitan": Preset(
        operators=(
            "aten.mm.default",
            "aten.mm.dtype",
            "aten.linear.default",
            "aten.addmm.default",
            "aten.bmm.default",
            "aten._scaled_mm.default",
            "aten.convolution.default",
            "aten.convolution_backward.default",
            "aten.upsample_bilinear2d.default",
            "aten._flash_attention_forward.default",
            "aten._efficient_attention_forward.default",
            "aten._scaled_dot_product_flash_attention.default",
            "aten._scaled_dot_product_efficient_attention.default",
            "aten._scaled_dot_product_cudnn_attention.default",
            "aten._scaled_dot_product_attention_math.default",
            "aten._scaled_dot_product_fused_attention_overrideable.default",
            "torch_attn._varlen_attn.default",
            "higher_order.flex_attention",
            "higher_order.inductor_compiled_code",
            "aten.max.default",
            "aten.topk.default",
            "_c10d_functional.reduce_scatter_tensor.default",
            "_c10d_functional.all_to_all_single.default",
        ),
        counted=("aten.mm.default", "aten.mm.dtype", "aten.linear.default"),
        recompute_every=2,
    ),
}


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
        save_ops: name of a preset, or names of groups and overloads.
        matmul_recompute_every: 0 never, k >= 2 every k-th saved matmul; `None` as the preset says, else 0.

    Raises:
        StrategyError: empty, unknown, an operator packet, an operator that writes to its input;
            every matmul recomputed, or a count with no matmul to count.
    """
    if isinstance(save_ops, str):
        return _from_preset(save_ops, matmul_recompute_every)
    if not save_ops:
        raise StrategyError(
            "ac.save_ops", f"is empty, which is full AC; use ac=full, or name some of {', '.join(GROUPS)}"
        )
    entries = {name: _operators(name) for name in save_ops}
    matmuls = _present(GROUPS["matmul"])
    counted = matmuls & frozenset().union(*entries.values())
    every = matmul_recompute_every or 0
    _check_count(counted, every)
    return SaveList(save_ops=save_ops, entries=entries, counted=counted, recompute_every=every)


def _from_preset(name: str, matmul_recompute_every: int | None) -> SaveList:
    if name not in PRESETS:
        remedy = f"write the list [{name}]" if name in GROUPS or "." in name else "write a list of names"
        raise StrategyError(
            "ac.save_ops", f"{name!r} is no preset; presets are: {', '.join(PRESETS)}; otherwise {remedy}"
        )
    preset = PRESETS[name]
    every = preset.recompute_every if matmul_recompute_every is None else matmul_recompute_every
    entries = {operator: _present((operator,)) for operator in preset.operators}
    counted = _present(preset.counted)
    _check_count(counted, every)
    return SaveList(save_ops=name, entries=entries, counted=counted, recompute_every=every)


def _check_count(counted: frozenset[Operator], every: int) -> None:
    where = "ac.matmul_recompute_every"
    if every < 0:
        raise StrategyError(where, f"must be 0 (never) or at least 2, got {every}")
    if every == 1:
        raise StrategyError(
            where, "must be 0 (never) or at least 2, got 1; to recompute every matmul use ac=full"
        )
    if every and not counted:
        raise StrategyError(where, f"is {every}, but ac.save_ops names no matmul; add matmul, or use 0")


def _operators(name: str) -> frozenset[Operator]:
    if name in GROUPS:
        return _present(GROUPS[name])
    found = _lookup(name)
    if found is None:
        raise StrategyError("ac.save_ops", f"{name!r} is no group and no operator; {_suggestion(name)}")
    if isinstance(found, OpOverloadPacket):
        overloads = ", ".join(
            f"{found}.{overload}" for overload in found.overloads() if _is_functional(found, overload)
        )
        raise StrategyError(
            "ac.save_ops",
            f"{name!r} is an operator packet, which never matches; its overloads are: {overloads}",
        )
    if isinstance(found, OpOverload) and found._schema.is_mutable:  # noqa: SLF001 (torch has no public schema)
        raise StrategyError(
            "ac.save_ops",
            f"{name!r} writes to its inputs, which saving would skip; name an operator that does not",
        )
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
