"""Versions: when a copy of memory for one tensor is right for another tensor on that memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from strategies.regions.versions import version_of


def written(tensor: Tensor) -> Tensor:
    return tensor.mul_(2)


ALIASES: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "itself": (lambda x: x, True),
    "a view": (lambda x: x[:4], True),
    "a view that is written": (lambda x: written(x[:4]), False),
    "its data": (lambda x: x.data, True),
    "its data, written": (lambda x: written(x.data), False),
    "a part with its own counter": (lambda x: x.unsafe_chunk(2)[1], True),
    "such a part, written": (lambda x: written(x.unsafe_chunk(2)[1]), False),
    "another view with its own counter, written": (
        lambda x: written(torch.ops.aten._unsafe_view(x, [2, 4])),
        False,
    ),
}


@pytest.mark.parametrize("begins_at", [0, 1, 2])
@pytest.mark.parametrize(("alias", "serves"), ALIASES.values(), ids=ALIASES)
def test_a_copy_serves_another_tensor_on_its_memory(
    alias: Callable[[Tensor], Tensor], serves: bool, begins_at: int
) -> None:
    tensor = torch.arange(8.0)
    for _ in range(begins_at):
        written(tensor)
    copied = version_of(tensor)
    other = alias(tensor)
    before = tensor._version, other._version
    assert copied.serves(version_of(other)) is serves
    assert (tensor._version, other._version) == before
