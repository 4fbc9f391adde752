"""Head and loss three ways: equal gradients, and the bytes that the plan said."""

from __future__ import annotations

import pytest

from bench.chunking import head_loss


@pytest.mark.parametrize("is_shifted", [False, True], ids=["all labels", "shifted labels"])
def test_ways_differ_in_bytes_only(*, is_shifted: bool) -> None:
    plain, by_hand, planned = head_loss._rows((2, 24, 8), 128, [0.1], is_shifted=is_shifted)
    assert [row.way for row in (plain, by_hand, planned)] == ["plain", "by hand", "planned 10%"]
    assert (plain.share, plain.relative_difference) == (1.0, 0.0)
    assert max(by_hand.relative_difference, planned.relative_difference) < 1e-5
    assert planned.peak_bytes == planned.predicted_bytes
    assert planned.share <= 0.1
    assert planned.share < by_hand.share < 1
