"""The table of nested regions checks itself: a byte, a product, a call or a difference too many is seen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.nested import BLOCK_INPUT_BYTES, BLOCKS_FLOPS, NestedStep, is_as_claimed

FLAT = NestedStep(
    levels=(64,),
    early_stop=False,
    saved_bytes=100 + 64 * BLOCK_INPUT_BYTES + 64 * 5056,
    rng_bytes=64 * 5056,
    activation_peak_bytes=0,
    recomputed_flops=BLOCKS_FLOPS,
    most_calls=2,
    difference=None,
)
ROOT = replace(
    FLAT,
    levels=(8, 8),
    saved_bytes=100 + 8 * BLOCK_INPUT_BYTES + 8 * 5056,
    rng_bytes=8 * 5056,
    recomputed_flops=2 * BLOCKS_FLOPS,
    most_calls=3,
)


@pytest.mark.parametrize(
    ("row", "is_right"),
    [
        pytest.param(FLAT, True, id="one level"),
        pytest.param(ROOT, True, id="two levels"),
        pytest.param(replace(ROOT, saved_bytes=ROOT.saved_bytes + 1), False, id="a byte too many"),
        pytest.param(replace(ROOT, recomputed_flops=BLOCKS_FLOPS), False, id="a forward too few"),
        pytest.param(replace(ROOT, most_calls=4), False, id="a call too many"),
        pytest.param(replace(ROOT, difference="parity: loss"), False, id="a difference"),
        pytest.param(
            replace(ROOT, early_stop=True, recomputed_flops=7), True, id="early stop follows from no formula"
        ),
        pytest.param(
            replace(ROOT, early_stop=True, difference="parity: loss"), False, id="a difference, stopped early"
        ),
    ],
)
def test_what_is_claimed(row: NestedStep, *, is_right: bool) -> None:
    assert is_as_claimed(row, [FLAT, row]) is is_right
