"""What is no number, of another kind, or a whole number is never close; a sharding's proof says so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from strategies.base import Tolerance
from strategies.estimate.closeness import drawn_like, furthest, have_one_kind
from strategies.shard.model import proof
from strategies.shard.model.proof import Results

_TOLERANCE = Tolerance(relative=1e-4, reason="another order", floor=1e-3)
_ONES, _INF, _NAN = torch.ones(3), float("inf"), float("nan")
_OFF = " off, where 0.0001 of the largest is allowed"
PAIRS = {
    # case: one, other, figure; none where they are close
    "equal": (_ONES, _ONES, None),
    "rounding": (_ONES, _ONES + 1e-5, None),
    "twice": (_ONES, 2 * _ONES, 1.0),
    "NaN in one": (_ONES, torch.tensor([1.0, _NAN, 1.0]), _INF),
    "NaN in both": (torch.tensor([1.0, _NAN]), torch.tensor([1.0, _NAN]), None),
    "NaN in both, twice beside": (torch.tensor([1.0, _NAN]), torch.tensor([2.0, _NAN]), 1.0),
    "inf in one": (_ONES, torch.tensor([1.0, _INF, 1.0]), _INF),
    "inf in both": (torch.tensor([1.0, _INF]), torch.tensor([1.0, _INF]), None),
    "inf in both, twice beside": (torch.tensor([1.0, _INF]), torch.tensor([2.0, _INF]), 1.0),
    "inf of another sign": (torch.tensor([1.0, _INF]), torch.tensor([1.0, -_INF]), _INF),
    "imaginary part": (_ONES + 3j, _ONES + 7j, 4 / 10**0.5),
    "bool": (_ONES.bool(), ~_ONES.bool(), _INF),
    "equal bool": (_ONES.bool(), _ONES.bool(), None),
    "whole numbers": (torch.tensor([1 << 60]), torch.tensor([(1 << 60) + 1]), _INF),
    "nothing": (torch.ones(0), torch.ones(0), None),
}
KINDS = {"dtype": (_ONES, _ONES.double()), "shape": (_ONES, torch.ones(1)), "whole": (_ONES, _ONES.long())}


@pytest.mark.parametrize(("one", "other", "off"), PAIRS.values(), ids=PAIRS)
def test_what_is_no_number_or_whole_is_never_close(one: Tensor, other: Tensor, off: float | None) -> None:
    found = furthest({"it": (one, other)}, _TOLERANCE)
    assert (found and found[1]) == (off and pytest.approx(off))
    dense, sharded = (Results(outputs=[each], gradients={"w": each}) for each in (one, other))
    said = [] if off is None else [f"{it} is {off:.1e}{_OFF}" for it in ("output 0", "the gradient of 'w'")]
    assert list(proof._differences(dense, sharded, _TOLERANCE)) == said


@pytest.mark.parametrize(("one", "other"), KINDS.values(), ids=KINDS)
def test_what_is_of_another_kind_is_never_close(one: Tensor, other: Tensor) -> None:
    assert not have_one_kind([one], [other])
    assert furthest({"it": (one, other)}, _TOLERANCE) == ("it", _INF)
    dense, sharded = (Results(outputs=[each], gradients={}) for each in (one, other))
    assert next(proof._differences(dense, sharded, _TOLERANCE)) == "output 0 has another shape or dtype"


def test_small_tensors_are_compared_with_a_share_of_the_largest_of_their_kind() -> None:
    small = torch.tensor([1e-9]), torch.tensor([2e-9])
    assert furthest({"small": small}, _TOLERANCE) is not None
    assert furthest({"small": small, "large": (_ONES, _ONES)}, _TOLERANCE) is None


def test_constants_are_equal_and_as_many() -> None:
    assert have_one_kind([_ONES, 1, None], [2 * _ONES, 1, None])
    assert not have_one_kind([1], [True])
    assert not have_one_kind([_ONES], [_ONES, _ONES])


def test_what_is_drawn_is_the_same_each_time() -> None:
    assert torch.equal(drawn_like(_ONES, 1), drawn_like(_ONES + 1, 1))
    assert drawn_like(_ONES + 0j, 1).dtype is torch.complex64
