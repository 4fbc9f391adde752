from __future__ import annotations

import random
import subprocess
import sys

import pytest

from harness.records.statistics import (
    MIN_PAIRS,
    Quantiles,
    Ratio,
    is_distinguishable,
    is_narrow,
    quantiles,
    ratio_to_baseline,
)


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        pytest.param([2.0], Quantiles(median=2.0, p10=2.0, p90=2.0, count=1), id="one sample"),
        pytest.param([1.0, 2.0], Quantiles(median=1.5, p10=1.1, p90=1.9, count=2), id="between two"),
        pytest.param(list(range(11)), Quantiles(median=5, p10=1, p90=9, count=11), id="on samples"),
        pytest.param([3.0, 1.0, 2.0], Quantiles(median=2.0, p10=1.2, p90=2.8, count=3), id="any order"),
    ],
)
def test_quantiles_interpolate(samples: list[float], expected: Quantiles) -> None:
    found = quantiles(samples)
    assert (found.median, found.count) == (expected.median, expected.count)
    assert (found.p10, found.p90) == pytest.approx((expected.p10, expected.p90), rel=1e-12)


def test_no_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="samples_s: needs at least one sample, got none"):
        quantiles([])


@pytest.mark.parametrize(
    ("variant", "twin", "message"),
    [
        pytest.param([1.0], [], "ratio: needs as many variant as twin samples, got 1 and 0", id="no twin"),
        pytest.param([], [], "ratio: needs as many variant as twin samples, got 0 and 0", id="nothing"),
        pytest.param([1.0], [0.0], "ratio: times must be positive, got 0.0", id="no time"),
    ],
)
def test_what_is_no_pair_of_times_is_refused(variant: list[float], twin: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ratio_to_baseline(variant, twin)


def test_the_ratio_is_the_median_over_pairs_not_the_ratio_of_medians() -> None:
    drifting = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]
    assert ratio_to_baseline([1.25 * time for time in drifting], drifting) == Ratio(
        median=1.25, low=1.25, high=1.25
    )


def test_the_interval_is_that_of_the_same_samples_every_time() -> None:
    generator = random.Random(0)
    variant, twin = ([generator.uniform(1, 2) for _ in range(20)] for _ in range(2))
    assert ratio_to_baseline(variant, twin) == ratio_to_baseline(variant, twin)


def test_one_wild_pair_moves_neither_median_nor_interval_far() -> None:
    variant = [1.1, 1.1, 1.1, 1.1, 1.1, 1.1, 1.1, 1.1, 1.1, 50.0]
    assert ratio_to_baseline(variant, [1.0] * 10) == Ratio(median=1.1, low=1.1, high=1.1)


@pytest.mark.parametrize("pairs", range(1, MIN_PAIRS))
def test_few_pairs_carry_no_ranking(pairs: int) -> None:
    ratio = ratio_to_baseline([2.0] * pairs, [1.0] * pairs)
    assert ratio == Ratio(median=2.0, low=1.0, high=2.0)
    assert not is_distinguishable(ratio)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        pytest.param(0.9, 1.1, False, id="spans 1"),
        pytest.param(1.0, 1.1, False, id="starts at 1"),
        pytest.param(0.9, 1.0, False, id="ends at 1"),
        pytest.param(1.005, 1.1, False, id="nearer to 1 than can be told"),
        pytest.param(0.97, 0.998, False, id="nearer to 1 than can be told, from below"),
        pytest.param(1.01, 1.1, True, id="slower"),
        pytest.param(0.9, 0.99, True, id="faster"),
    ],
)
def test_a_ranking_is_refused_when_the_interval_spans_1(low: float, high: float, expected: bool) -> None:
    assert is_distinguishable(Ratio(median=1.0, low=low, high=high)) is expected


def test_the_interval_covers_the_true_ratio_about_as_often_as_it_says() -> None:
    generator = random.Random(0)
    covered = 0
    for _ in range(100):
        twin = [generator.gauss(1, 0.05) for _ in range(20)]
        ratio = ratio_to_baseline([1.2 * generator.gauss(1, 0.05) for _ in twin], twin)
        covered += ratio.low <= 1.2 <= ratio.high
    assert 88 <= covered <= 100


def test_reports_need_no_torch_for_it() -> None:
    modules = "harness.records.statistics, harness.records.parity_result"
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        pytest.param([1.3] * 5, False, id="five pairs enclose no median"),
        pytest.param([1.3] * 6, True, id="six equal pairs"),
        pytest.param([*[1.3] * 5, 1.33], False, id="six pairs, by their extremes"),
        pytest.param([1.0, *[1.3] * 8, 2.0], True, id="ten pairs, without their extremes"),
        pytest.param([1.0, 1.0, *[1.3] * 6, 2.0, 2.0], False, id="ten pairs, two of them far on each side"),
        pytest.param([1.29, 1.29, *[1.3] * 6, 1.3099, 1.3099], True, id="a width of two per cent"),
    ],
)
def test_an_interval_as_narrow_as_what_can_be_told_apart(ratios: list[float], expected: bool) -> None:
    assert is_narrow([2 * ratio for ratio in reversed(ratios)], [2.0] * len(ratios)) is expected
