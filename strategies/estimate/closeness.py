"""The difference that two results may have: NaN, another kind and whole numbers are never close."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from strategies.base import Tolerance


def furthest(pairs: Mapping[str, tuple[Tensor, Tensor]], allowed: Tolerance) -> tuple[str, float] | None:
    """Return name and figure of the first pair that is further apart than is allowed, of pairs of a kind."""
    largest = max((_size(one) for one, _ in pairs.values()), default=0.0)
    for name, (one, other) in pairs.items():
        of = max(_size(one), allowed.floor * largest)
        apart = _apart(one, other)
        if apart and not apart <= allowed.relative * of:  # what is no number is not within it
            return name, apart / of if of else float("inf")
    return None


def have_one_kind(leaves: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether as many leaves are of one kind; constants are equal."""
    return len(leaves) == len(others) and all(
        (one.shape, one.dtype) == (other.shape, other.dtype)
        if isinstance(one, Tensor) and isinstance(other, Tensor)
        else type(one) is type(other) and repr(one) == repr(other)
        for one, other in zip(leaves, others, strict=True)
    )


def drawn_like(tensor: Tensor, seed: int) -> Tensor:
    """Return a gradient for a tensor, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype, device="cpu").to(tensor.device)


def _size(tensor: Tensor) -> float:
    """Return the largest size of an element, of those that are finite."""
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    return float(tensor.abs().nan_to_num(0.0, 0.0, 0.0).max())


def _apart(one: Tensor, other: Tensor) -> float:
    """Return how far tensors are apart; infinitely where whole numbers, or what is no number, differ."""
    if not have_one_kind([one], [other]):
        return float("inf")
    if not one.numel():
        return 0.0
    if not (one.is_floating_point() or one.is_complex()):
        return 0.0 if torch.equal(one, other) else float("inf")
    apart = (one - other).abs()
    is_same = (one == other) | (one.isnan() & other.isnan())
    return float(torch.where(is_same, 0.0, apart.nan_to_num(float("inf"), float("inf"))).max())
