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
from torch.utils.flop_counter import flop_registry


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the FLOPs of one call; 0 without formula: elementwise operators, copies, reductions."""
    packet = getattr(func, "_overloadpacket", func)
    formula = _CPU_ATTENTION.get(packet) or flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


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
