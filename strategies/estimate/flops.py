"""Floating-point operations of operators: torch's formulas and those it lacks.

A multiplication and an addition are two FLOPs. Attention counts the whole S x S square, causal or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the FLOPs of one call; 0 without formula: elementwise operators, copies, reductions."""
    packet = getattr(func, "_overloadpacket", func)
    formula = _CPU_ATTENTION.get(packet) or flop_registry.get(_IN_PLACE.get(packet, packet))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def called(func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return operator and positional operands of a call; of one of higher order, those that it hands on.

    Compiled code draws random numbers again by `run_with_rng_state(state, operator, *operands)`.
    """
    place = next((place for place, value in enumerate(args) if isinstance(value, OpOverload)), None)
    return (func, args) if place is None else (args[place], args[place + 1 :])


def repeated_scores(func: Any, args: tuple[Any, ...], flops: int) -> int:
    """Return those of a call's `flops` that compute attention scores once more, inside a backward kernel.

    Of its five products three have the depth of queries (scores, dQ, dK) and two that of values (dP, dV).
    """
    if getattr(func, "_overloadpacket", func) not in _ATTENTION_BACKWARD:
        return 0
    _, query, _, value = args[:4]
    depth, depth_of_values = query.shape[-1], value.shape[-1]
    return int(flops * depth // (3 * depth + 2 * depth_of_values))


def is_causal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call is of attention with a causal mask of its own, which leaves half of the square out."""
    names = [argument.name for argument in func._schema.arguments]  # noqa: SLF001 (torch has no public schema)
    given = dict(zip(names, args, strict=False)) | kwargs
    return given.get("is_causal") is True


def _cpu_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Q·Kᵀ and P·V. Shapes: query (B, H, S, D), key (B, Hkv, T, D), value (B, Hkv, T, Dv)."""
    return _scores(query, key) + _scores(query, key) // query.shape[-1] * value.shape[-1]


def _cpu_attention_backward(
    _: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any
) -> int:
    """Scores once more, dQ and dK over D; dP and dV over Dv: as torch counts the flash kernels of CUDA."""
    return 3 * _scores(query, key) + 2 * (_scores(query, key) // query.shape[-1] * value.shape[-1])


def _scores(query: Tensor, key: Tensor) -> int:
    return 2 * prod(query.shape) * key.shape[-2]


_CPU_ATTENTION: Mapping[Any, Callable[..., int]] = MappingProxyType(
    {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,  # noqa: SLF001 (its only name)
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,  # noqa: SLF001 (its only name)
    }
)

_IN_PLACE: Mapping[Any, Any] = MappingProxyType(
    {torch.ops.aten.addmm_: torch.ops.aten.addmm, torch.ops.aten.baddbmm_: torch.ops.aten.baddbmm}
)
"""Products that add to an operand in place, for which torch has no formula: loops make gradients by them."""

_ATTENTION_BACKWARD = frozenset(
    {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,  # noqa: SLF001 (its only name)
        torch.ops.aten._scaled_dot_product_flash_attention_backward,  # noqa: SLF001 (its only name)
        torch.ops.aten._scaled_dot_product_efficient_attention_backward,  # noqa: SLF001 (its only name)
        torch.ops.aten._scaled_dot_product_cudnn_attention_backward,  # noqa: SLF001 (its only name)
        torch.ops.aten._flash_attention_backward,  # noqa: SLF001 (its only name)
        torch.ops.aten._efficient_attention_backward,  # noqa: SLF001 (its only name)
    }
)
