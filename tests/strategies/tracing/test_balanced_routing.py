"""Places of an expert are as many as equal shares have; nothing else that depends on data has an answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from strategies.tracing.balanced_routing import BALANCED, BalancedFakes


@pytest.mark.parametrize(
    ("places", "shares"),
    [
        pytest.param(lambda chosen, e: chosen == e, [6, 5, 5, 5, 5], id="of all choices"),
        pytest.param(lambda chosen, e: (chosen == e).transpose(0, 1), [6, 5, 5, 5, 5], id="seen otherwise"),
        pytest.param(lambda chosen, e: chosen[:, 0] == e, [3, 3, 3, 2, 2], id="of first choices"),
        pytest.param(lambda chosen, e: chosen.detach() == e, [6, 5, 5, 5, 5], id="aside of autograd"),
    ],
)
def test_shares_add_up(places: Callable[[Tensor, int], Tensor], shares: list[int]) -> None:
    with BalancedFakes():
        chosen = torch.empty(13, 5).topk(2)[1]
        assert [places(chosen, expert).nonzero().size(0) for expert in range(5)] == shares


def test_counts_are_shares() -> None:
    with BalancedFakes() as fakes:
        chosen = torch.empty(13, 5).topk(2)[1]
        counts = chosen.flatten().bincount(minlength=5)
        assert not fakes.assumes
        assert counts.view(1, 5).tolist() == [[6, 5, 5, 5, 5]]
    assert fakes.assumes == (BALANCED,)


@pytest.mark.parametrize("minlength", [0, 4, 7])
def test_counts_of_other_numbers_are_not_known(minlength: int) -> None:
    with BalancedFakes() as fakes:
        chosen = torch.empty(13, 5).topk(2)[1]
        with pytest.raises(DynamicOutputShapeException):
            chosen.flatten().bincount(minlength=minlength)
    assert fakes.assumes == ()


@pytest.mark.parametrize(
    "places",
    [
        pytest.param(lambda _chosen: torch.empty(13) > 0, id="no choices"),
        pytest.param(lambda chosen: chosen == 7, id="no expert"),
        pytest.param(lambda chosen: (chosen == 1) & (chosen.sum() > 0), id="fewer than all places"),
        pytest.param(lambda chosen: (chosen == 1).logical_not_(), id="places that were changed"),
        pytest.param(lambda chosen: chosen.fill_(1) == 1, id="choices that were changed"),
    ],
)
def test_nothing_else_is_assumed(places: Callable[[Tensor], Tensor]) -> None:
    with BalancedFakes() as fakes:
        chosen = torch.empty(13, 5).topk(2)[1]
        with pytest.raises(DynamicOutputShapeException):
            places(chosen).nonzero()
    assert fakes.assumes == ()
