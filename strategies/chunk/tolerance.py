"""The difference that a program in chunks may have; no torch, because the command line reads it."""

from __future__ import annotations

from strategies.base import Tolerance

_REASON = "gradients of weights are summed chunk by chunk, and kernels round by the number of rows"
TOLERANCE = Tolerance(relative=1e-3, floor=1e-2, reason=_REASON)
"""In single and double precision."""
REDUCED_TOLERANCE = Tolerance(relative=1e-1, floor=5e-2, reason=_REASON)
"""In half precision, and under autocast."""
