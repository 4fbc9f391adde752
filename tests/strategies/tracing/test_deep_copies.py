"""Deep copies of fake tensors are as those with data: they share no mode, no constant, and one storage."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from strategies.estimate.liveness import key_of
from strategies.tracing.fakes import Fakes
from strategies.tracing.following import as_with_data


def _views() -> tuple[Tensor, Tensor]:
    whole = torch.zeros(4, 6)
    whole[:, 3:] = 1
    return whole[1:], whole[:, 2:]


def _with_attribute() -> Any:
    made = torch.zeros(3)
    made.names_of_rows = ["a", "b"]  # type: ignore[attr-defined]
    return made


def _layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(8, 2, batch_first=True)


_COPIED: dict[str, Callable[[], Any]] = {
    "a tensor": lambda: torch.ones(3, 4).t(),
    "views of one storage": _views,
    "one tensor twice": lambda: [torch.ones(2)] * 2,
    "a number": lambda: torch.tensor(3),
    "a buffer that counts": lambda: nn.BatchNorm1d(4),
    "an encoder, whose layers are copies": lambda: nn.TransformerEncoder(_layer(), 2),
    "a frozen parameter": lambda: nn.Parameter(torch.ones(2, 3).t(), requires_grad=False),
    "a part of a parameter's storage": lambda: nn.Parameter(torch.ones(4, 3)[1:]),
    "a leaf with a gradient": lambda: torch.ones(3, requires_grad=True),
    "a tensor with an attribute": _with_attribute,
}


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    return [value] if isinstance(value, Tensor) else list(value)


def _facts(value: Any) -> list[object]:
    """Return what there is to know of tensors: layouts, flags, and which of them share a storage."""
    tensors = _tensors(value)
    order = list(dict.fromkeys(map(key_of, tensors)))
    return [
        (
            isinstance(each, nn.Parameter),
            tuple(each.shape),
            each.stride(),
            each.storage_offset(),
            each.untyped_storage().nbytes(),
            each.dtype,
            each.requires_grad,
            getattr(each, "names_of_rows", None),
            order.index(key_of(each)),
        )
        for each in tensors
    ]


@pytest.mark.parametrize("make", _COPIED.values(), ids=_COPIED.keys())
def test_copies_are_those_with_data(make: Callable[[], Any]) -> None:
    expected = _facts(copy.deepcopy(make()))
    mode = Fakes(allow_non_fake_inputs=True)
    with as_with_data(), mode:
        made = make()
        copied = copy.deepcopy(made)
        assert _facts(copied) == expected
        assert not {*map(key_of, _tensors(made))} & {*map(key_of, _tensors(copied))}
        assert all(each.fake_mode is mode for each in _tensors(copied) if isinstance(each, FakeTensor))


def test_a_copied_number_is_its_own() -> None:
    with as_with_data(), Fakes(allow_non_fake_inputs=True):
        number = torch.tensor(3)
        copied = copy.deepcopy(number)
        number.add_(1)
        assert (number.item(), copied.item()) == (4, 3)
        copied.mul_(5)
        assert (number.item(), copied.item()) == (4, 15)


def test_what_is_no_leaf_is_refused_as_with_data() -> None:
    with as_with_data(), Fakes(allow_non_fake_inputs=True):
        product = torch.ones(2, requires_grad=True) * 2
        with pytest.raises(RuntimeError, match="graph leaves"):
            copy.deepcopy(product)
