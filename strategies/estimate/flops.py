"""Floating-point operations of operators: torch's formulas and those it lacks.

A multiplication and an addition are two FLOPs. Attention counts the whole S x S square, causal or not.

An operator of torch that neither multiplies matrices nor convolves, recurs, transforms, factorises or solves
has none: its work is bounded by the bytes that it reads and writes, which a machine's seconds count. An
operator that does, by its name, and has no formula is *uncounted*. So is each operator that is not torch's:
nobody knows what it does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from strategies.estimate.flop_formulas import FORMULAS, sparse_flops


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the FLOPs of one call; 0 without formula: elementwise operators, copies, reductions."""
    found = _product_with_sparse(func, args, kwargs)
    if found is not None:
        return found
    formula = _formula_of(func)
    return 0 if formula is None else int(formula(args, kwargs, result))


def is_uncounted(func: Any, args: Sequence[Any] = ()) -> bool:
    """Return whether an operator computes more than its bytes tell, and there is no formula for it.

    Args:
        args: its positional operands: of two sparse matrices the product depends on their data.
    """
    places = _SPARSE_FACTORS.get(_name_of(func).removesuffix("_"))
    if places is not None:
        return len(args) > max(places) and all(_is_sparse(args[place]) for place in places)
    return _has_no_formula(func)


def has_own_formula(func: Any) -> bool:
    """Return whether FLOPs of an operator follow from a formula that torch has not."""
    return _name_of(func) in FORMULAS


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
    """Say if a call is of attention with a causal mask of its own, which leaves half of the square out."""
    names = [argument.name for argument in func._schema.arguments]  # noqa: SLF001 (torch has no public schema)
    given = dict(zip(names, args, strict=False)) | kwargs
    return given.get("is_causal") is True


@cache
def _formula_of(func: Any) -> Callable[[tuple[Any, ...], dict[str, Any], Any], Any] | None:
    """Return the formula of an operator, from its operands as they are given; `None` where it has none."""
    packet = getattr(func, "_overloadpacket", func)
    name = _name_of(func)
    out_of_place = name.removesuffix("_")  # `addmm` of `addmm_`: torch has its formula
    of_torch = flop_registry.get(packet) or flop_registry.get(getattr(torch.ops.aten, out_of_place, None))
    own = FORMULAS.get(name) or FORMULAS.get(out_of_place)
    if own is not None:
        names = [argument.name for argument in func._schema.arguments]  # noqa: SLF001 (torch has no public schema)
        return lambda args, kwargs, result: own(dict(zip(names, args, strict=False)) | kwargs, result)
    if of_torch is not None:
        return lambda args, kwargs, result: of_torch(*args, **kwargs, out_val=result)
    return None


@cache
def _has_no_formula(func: Any) -> bool:
    if not isinstance(func, OpOverload):
        return _name_of(func).startswith(_FOREIGN_KERNEL)
    if func.is_view or _formula_of(func) is not None or not _gives_tensors(func):
        return False
    name = _name_of(func)
    if func.namespace not in _KNOWN_NAMESPACES:
        return True
    return name not in _BOUNDED and any(map(_ARITHMETIC.fullmatch, name.strip("_").split("_")))


def _gives_tensors(func: OpOverload) -> bool:
    schema = func._schema  # noqa: SLF001 (as above)
    written = (each for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write)
    return any("Tensor" in str(each.type) for each in (*schema.returns, *written))


def _product_with_sparse(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Return the FLOPs of a product with one sparse matrix; `None` of every other call."""
    places = _SPARSE_FACTORS.get(_name_of(func).removesuffix("_"))
    if places is None or not any(map(_is_sparse, args)):
        return None
    names = [argument.name for argument in func._schema.arguments]  # noqa: SLF001 (as above)
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    factors = [given[names[place]] for place in places]
    return sparse_flops(*factors) or 0


def _is_sparse(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout not in {torch.strided, torch.jagged}


@cache
def _name_of(func: Any) -> str:
    schema = getattr(func, "_schema", None)
    return str(func) if schema is None else schema.name.rpartition("::")[2]


_FOREIGN_KERNEL = "triton_kernel_wrapper"
"""What the names of operators of higher order begin with that run a kernel of the user's."""

_KNOWN_NAMESPACES = frozenset(
    {
        "aten", "prims", "prim", "rngprims", "inductor", "inductor_prims", "profiler", "debugprims",
        "streams", "symm_mem", "fsdp", "c10d", "c10d_functional", "_c10d_functional", "_dtensor", "bucketing",
        "_c10d_functional_autograd",
    }
)  # fmt: skip
"""Namespaces whose operators say by their names what they compute."""

_ARITHMETIC = re.compile(
    r"\w*mm|\w*mv|v?dot|matmul|linear|conv\w*(?<!convert)|rnn|lstm|gru|attention|fft|linalg|cholesky|solve|spsolve"
    r"|lu|qr|geqrf|orgqr|ormqr|inverse|det|svd|eig\w*|lstsq|cdist|pdist|trilinear|sampler|sampled|transformer"
    r"|combination|semi"
)
"""Words in the names of operators that multiply, factorise or transform."""

_BOUNDED = frozenset(
    {
        "_thnn_fused_lstm_cell", "_thnn_fused_lstm_cell_backward_impl", "_thnn_fused_lstm_cell_backward",
        "_thnn_fused_gru_cell", "_thnn_fused_gru_cell_backward", "_cudnn_rnn_flatten_weight", "lu_unpack",
        "linalg_vector_norm", "linalg__powsum", "linalg_cross", "_linalg_check_errors", "linalg_diagonal",
        "fft_fftfreq", "fft_rfftfreq", "mkldnn_reorder_conv2d_weight", "mkldnn_reorder_conv3d_weight",
        "_to_sparse_semi_structured", "_sparse_semi_structured_tile", "_transform_bias_rescale_qkv",
    }
)  # fmt: skip
"""Operators with such a word whose work is bounded by their bytes: gates, copies, norms, checks."""

_SPARSE_FACTORS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "mm": (0, 1), "mv": (0, 1), "bmm": (0, 1), "hspmm": (0, 1),
        "addmm": (1, 2), "addmv": (1, 2), "sspaddmm": (1, 2), "_sparse_addmm": (1, 2),
    }
)  # fmt: skip
"""Positions of the factors of products that take sparse matrices."""

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
