"""Changes that backends of `torch.compile` may make: none, or the rounding of their own kernels."""

from __future__ import annotations

from dataclasses import replace

from strategies import Tolerance

COMPILERS = ("none", "aot_eager", "inductor")
"""Backends by the option `compile` that chooses them."""

ORDERS = ("ac_first", "compile_first")
"""Whether compiled code holds the regions of AC, or a region compiled code."""

SCOPES = ("blocks", "model")
"""What is compiled: each block, or the model as one."""

DRAWS_AS_EAGER = ("fallback_random",)
"""Options of `torch._inductor.config`: kernels draw the random numbers of the uncompiled model."""

ROUNDS_AS_EAGER = ("emulate_precision_casts",)
"""The same: kernels round to half precision after each operator, as the uncompiled model does."""

_REASON = "generated kernels add in another order and join a product with a sum, which rounds otherwise"
_TOLERANCE = Tolerance(relative=1e-3, floor=1e-2, reason=_REASON)
_REDUCED_TOLERANCE = Tolerance(relative=1e-1, floor=5e-2, reason=_REASON)
_DROPOUT_TOLERANCE = Tolerance(
    relative=1e-1,
    floor=5e-2,
    reason="traced dropout is one operator, whose backward rounds its factor otherwise in half precision",
)
_RECOMPUTED_TOLERANCE = replace(
    _TOLERANCE, reason="kernels that compute values again join other operators, and so add in another order"
)
_REDUCED_RECOMPUTED_TOLERANCE = replace(
    _REDUCED_TOLERANCE,
    reason="kernels use what they compute again unrounded, where forward stored it in half precision",
)


def tolerance_of(compiler: str, *, is_reduced: bool, may_drop_out: bool) -> Tolerance | None:
    """Return how far what `compiler` made may be from the same model uncompiled.

    `aot_eager` runs the kernels of the uncompiled model, so that all bits are equal; but for dropout in half
    precision, for which the traced `native_dropout_backward` multiplies by 1 / (1 - p), and the uncompiled
    model by that number in half precision.

    Args:
        compiler: one of `COMPILERS`.
        is_reduced: something is computed in half precision.
        may_drop_out: the model has dropout, or nobody knows.
    """
    if compiler == "inductor":
        return _REDUCED_TOLERANCE if is_reduced else _TOLERANCE
    return _DROPOUT_TOLERANCE if compiler == "aot_eager" and is_reduced and may_drop_out else None


def tolerance_of_recomputation(*, is_reduced: bool) -> Tolerance:
    """Return how far AC inside generated kernels may be from its twin under the same compiler.

    Args:
        is_reduced: something is computed in half precision.
    """
    return _REDUCED_RECOMPUTED_TOLERANCE if is_reduced else _RECOMPUTED_TOLERANCE
