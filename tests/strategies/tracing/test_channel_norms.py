"""Group norms in two passes give what torch's give; sums of parts are those of the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional

from strategies.tracing.channel_norms import norm_applied, norm_scales, norm_sums, whole_norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("shape", "mean"),
    [
        pytest.param((2, 6, 8, 4), 0.0, id="pictures"),
        pytest.param((2, 6, 32), 1.0, id="sequences"),
        pytest.param((1, 6, 8, 4), 300.0, id="far from zero"),
    ],
)
@pytest.mark.parametrize("is_affine", [True, False])
def test_passes_give_the_norm(
    shape: tuple[int, ...], mean: float, dtype: torch.dtype, *, is_affine: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype) + mean
    weight, bias = (torch.randn(6, dtype=dtype) if is_affine else None for _ in range(2))
    sums = sum(norm_sums(part) for part in x.split(3, 2))
    assert isinstance(sums, Tensor)
    scales = norm_scales(sums, weight, bias, x[0, 0].numel(), 3, 1e-5, dtype)
    expected = functional.group_norm(x, 3, weight, bias)
    torch.testing.assert_close(norm_applied(x, scales), expected, rtol=1e-4, atol=2e-4)


def test_passes_that_others_use_are_no_whole_norm() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    sums = graph.call_function(norm_sums, (x,))
    scales = graph.call_function(norm_scales, (sums, None, None, 4, 2, 1e-5, torch.float32))
    last = graph.call_function(norm_applied, (x, scales))
    assert whole_norms({sums, scales, last}) == {last: frozenset({sums, scales})}
    assert whole_norms({scales, last}) == {}
    graph.call_function(norm_applied, (x, scales))
    assert whole_norms({sums, scales, last}) == {}
