"""The distance of a variant from the least that any schedule of its step's operators costs at its peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredBound:
    """The bound of one rank's step, from the operators of its twin.

    Fields:
        peak_bytes, host_peak_bytes: bytes that the variant had on the device and on the host, at most.
        recomputed_flops: FLOPs that it ran again.
        lower_bound_extra_flops: FLOPs that any schedule of the twin's operators runs again within these
            bytes, at least; `None` where there is no such schedule.
        lower_bound_autograd_flops: the same of schedules that run backward in the twin's order; `None` where
            there is none, or nobody has asked.
    """

    peak_bytes: int
    host_peak_bytes: int
    recomputed_flops: int
    step_flops: int
    lower_bound_extra_flops: int | None
    lower_bound_autograd_flops: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """The bound of a variant, on the rank with the highest peak.

    Fields:
        host_peak_bytes: bytes that it had on the host, at most.
        lower_bound_extra_flops: no schedule of the step's operators keeps both with fewer FLOPs run again.
        lower_bound_autograd_flops: none that runs backward in the order of the plain step; `None` where that
            order is not known to be the variant's, as on several ranks.
        points_above: what the variant runs again above the first, in percent of the plain step's FLOPs.
    """

    peak_bytes: int
    host_peak_bytes: int = 0
    lower_bound_extra_flops: int
    lower_bound_autograd_flops: int | None = None
    points_above: float
    points_above_autograd: float | None = None


def merge_bounds(ranks: Sequence[MeasuredBound]) -> Bound | None:
    """Return the bound of the rank with the highest peak; `None` where no schedule has it."""
    highest = max(ranks, key=lambda rank: rank.peak_bytes)
    least, in_order = highest.lower_bound_extra_flops, highest.lower_bound_autograd_flops
    if least is None:
        return None

    def points(flops: int) -> float:
        return 100 * (highest.recomputed_flops - flops) / max(highest.step_flops, 1)

    return Bound(
        peak_bytes=highest.peak_bytes,
        host_peak_bytes=highest.host_peak_bytes,
        lower_bound_extra_flops=least,
        lower_bound_autograd_flops=in_order,
        points_above=points(least),
        points_above_autograd=None if in_order is None else points(in_order),
    )


def contradiction(ranks: Sequence[MeasuredBound], bound: Bound | None) -> str | None:
    """Say that a variant is below its bound, which cannot be; `None` where it is not."""
    why = "it runs other operators than the plain step, or the bound is wrong"
    if bound is None:
        return f"no schedule of the plain step's operators has its peak: {why}" if ranks else None
    if bound.points_above < 0:
        return f"it runs {-bound.points_above:.2f} % of the step's FLOPs less again than any schedule: {why}"
    if bound.points_above_autograd is not None and bound.points_above_autograd < 0:
        below = -bound.points_above_autograd
        return f"it is {below:.2f} % below the bound of backward in the plain step's order: it runs another"
    return None
