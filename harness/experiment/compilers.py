"""What the backends of `torch.compile` may change: nothing, or the rounding of their own kernels."""

from __future__ import annotations

from strategies import Tolerance

COMPILERS = ("none", "aot_eager", "inductor")
"""Backends by the option `compile` that chooses them."""

ORDERS = ("ac_first", "compile_first")
"""Whether compiled code holds the regions of AC, or a region compiled code."""

SCOPES = ("blocks", "model")
"""What is compiled: each block, or the model as one."""

_REASON = "generated kernels add in another order and join a product with a sum, which rounds otherwise"
_TOLERANCE = Tolerance(relative=1e-3, floor=1e-2, reason=_REASON)
_REDUCED_TOLERANCE = Tolerance(relative=1e-1, floor=5e-2, reason=_REASON)


def tolerance_of(compiler: str, *, is_reduced: bool) -> Tolerance | None:
    """Return how far what `compiler` made may be from the same model uncompiled.

    `aot_eager` runs the kernels of the uncompiled model, so that all bits are equal.

    Args:
        compiler: one of `COMPILERS`.
        is_reduced: something is computed in half precision.
    """
    if compiler != "inductor":
        return None
    return _REDUCED_TOLERANCE if is_reduced else _TOLERANCE
