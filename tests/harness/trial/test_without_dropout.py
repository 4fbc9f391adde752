from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.trial.without_dropout import WithoutDropout

_X = torch.ones(2, 4, 8)
_MODULE = nn.MultiheadAttention(8, 2, 0.5)


def _attention(x: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)


@pytest.mark.parametrize(
    "dropped",
    [
        pytest.param(nn.Dropout(0.5), id="module"),
        pytest.param(nn.AlphaDropout(0.5), id="alpha"),
        pytest.param(nn.Dropout1d(0.5), id="channels"),
        pytest.param(lambda x: functional.dropout(x, 0.5), id="function, by default on"),
        pytest.param(lambda x: functional.dropout(x, 0.5, True), id="function, by position"),
        pytest.param(lambda x: torch.dropout(x, 0.5, True), id="of torch"),
        pytest.param(lambda x: torch.dropout(x, p=0.5, train=True), id="of torch, by name"),
        pytest.param(_attention, id="attention"),
        pytest.param(lambda x: _MODULE(x, x, x)[0] * 0 + x, id="module of attention"),
    ],
)
def test_nothing_is_dropped_and_no_number_is_drawn(dropped: Callable[[Tensor], Tensor]) -> None:
    before = torch.get_rng_state()
    with WithoutDropout():
        assert torch.equal(dropped(_X), _X)
    assert torch.equal(torch.get_rng_state(), before)
