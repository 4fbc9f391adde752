"""Statistics of step times: quantiles, and the ratio of variant to twin with its interval.

Torch-free, so that reports need none. Times are seconds, ratios have no unit.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb
from statistics import median

RESOLUTION = 0.01
"""What no interleaving tells apart: the same model built twice lies elsewhere in memory, and may be up to one
per cent faster or slower in every pair (measured: 0.99, with an interval from 0.97 to 0.998)."""

MIN_PAIRS = 6
"""Fewest pairs of which the extremes enclose the median with 95 % confidence: 1 - 2 / 2**n."""

_RESAMPLES = 5_000
_TAIL = 0.025
_SEED = 20_221_004  # any constant: the interval of given samples must not vary from report to report


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantiles:
    """Location and spread of step times.

    Fields:
        median, p10, p90: seconds; between two samples, the linear interpolation.
    """

    median: float
    p10: float
    p90: float
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """The variant's step time divided by the twin's.

    Fields:
        low, high: bounds of the 95 % bootstrap interval of that median. With fewer than
            `MIN_PAIRS` pairs they always enclose 1: so few cannot carry a ranking.
    """

    median: float
    low: float
    high: float


def quantiles(samples_s: Sequence[float]) -> Quantiles:
    """Return median, 10th and 90th percentile of `samples_s`. Raises ValueError: there is no sample."""
    if not samples_s:
        raise ValueError("samples_s: needs at least one sample, got none")
    ordered = sorted(samples_s)
    return Quantiles(
        median=_quantile(ordered, 0.5),
        p10=_quantile(ordered, 0.1),
        p90=_quantile(ordered, 0.9),
        count=len(ordered),
    )


def ratio_to_baseline(variant_s: Sequence[float], twin_s: Sequence[float]) -> Ratio:
    """Return the median of the pairwise ratios variant / twin with its 95 % interval.

    Samples of equal index were taken side by side, so drift of the machine cancels within a pair.
    The interval is the percentile bootstrap (Efron and Tibshirani 1993, chapter 13) with a fixed
    seed: the same samples always give the same interval.

    Raises:
        ValueError: the samples are not pairs of positive times.
    """
    if len(variant_s) != len(twin_s) or not variant_s:
        problem = "ratio: needs as many variant as twin samples"
        raise ValueError(f"{problem}, got {len(variant_s)} and {len(twin_s)}")
    if min(*variant_s, *twin_s) <= 0:
        raise ValueError(f"ratio: times must be positive, got {min(*variant_s, *twin_s)}")
    ratios = [variant / twin for variant, twin in zip(variant_s, twin_s, strict=True)]
    low, high = _bootstrap_interval(tuple(ratios))
    if len(ratios) < MIN_PAIRS:
        low, high = min(low, 1.0), max(high, 1.0)
    return Ratio(median=median(ratios), low=low, high=high)


def is_narrow(variant_s: Sequence[float], twin_s: Sequence[float]) -> bool:
    """Say whether the median of the pairwise ratios is known to `RESOLUTION`: more pairs tell no more.

    The interval is that of the sign test (order statistics, 95 % or more), because it is asked for between
    timed steps. Pairs that end by it carry an interval of 91 to 95 %, not 93 to 95 % (simulated: normal noise
    and Student's t with 2 degrees of freedom, 0.3 to 4 % of a step, looked at after 10, 12, ... of 20 pairs).
    """
    ratios = sorted(variant / twin for variant, twin in zip(variant_s, twin_s, strict=True))
    count, outside, tail = len(ratios), 0, 0.5 ** len(ratios)
    while tail <= _TAIL:
        outside += 1
        tail += comb(count, outside) / 2**count
    return outside > 0 and ratios[count - outside] - ratios[outside - 1] <= 2 * RESOLUTION


def is_distinguishable(ratio: Ratio) -> bool:
    """Say whether variant and twin may be ranked: the interval stays clear of 1 by `RESOLUTION`."""
    return ratio.low >= 1 + RESOLUTION or ratio.high <= 1 - RESOLUTION


@lru_cache  # the same samples are judged for each record that has them
def _bootstrap_interval(values: tuple[float, ...]) -> tuple[float, float]:
    if min(values) == max(values):  # so is each resample
        return values[0], values[0]
    generator = random.Random(_SEED)  # noqa: S311 (resampling, not cryptography)
    medians = sorted(median(generator.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return _quantile(medians, _TAIL), _quantile(medians, 1 - _TAIL)


def _quantile(ordered: Sequence[float], fraction: float) -> float:
    """Interpolate linearly between the two order statistics around `fraction`."""
    position = fraction * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])
