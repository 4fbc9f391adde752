"""Parity: does the variant compute what its twin computes, bit for bit.

Compared are names and their order, classes, shapes, dtypes, devices, absence, and the bits of every value:
-0.0 is not 0.0, and a NaN equals the same NaN in the same place. A declared tolerance loosens the values of
floating-point tensors, nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.difference import PARTS, Difference, Parity, PartParity
from harness.measure.snapshot import Captured, Leaves, Snapshot, has_identity_only, steps

__all__ = ["Snapshot", "StepParity", "compare", "compare_steps", "steps", "summarise"]

_BLOCK = 1 << 20
"""Elements measured at a time: distances need several float64 temporaries, which should stay in a cache."""

_SAME_SIZE_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParity:
    """One step of the variant against the same step of the twin.

    Fields:
        parts: every key of `PARTS`.
        loss: the variant's.
        level: `bitwise` or `tolerance`.
    """

    parts: Mapping[str, PartParity]
    loss: float
    level: str


def compare_steps(
    expected: Iterator[Snapshot],
    actual: Iterator[Snapshot],
    *,
    count: int,
    rank: int = 0,
    tolerance: float | None = None,
    floor: float = 0.0,
    stride: float = 0.0,
) -> Parity:
    """Compare the next `count` steps of the twin (`expected`) and the variant, one at a time.

    Both iterators may train while they are read: then the models step side by side, and one snapshot of
    each exists at most. `zip` would hold the last two while the next two are made.

    Raises:
        ValueError: an iterator ends before `count` steps, or `count` is below 1.
    """
    compared = []
    for step in range(count):
        try:
            pair = next(expected), next(actual)
            drift = (step + 1) * stride
            compared.append(
                compare(*pair, rank=rank, step=step, tolerance=tolerance, floor=floor, drift=drift)
            )
        except StopIteration as end:
            raise ValueError(f"parity: asked for {count} steps, but only {step} were trained") from end
    return summarise(compared)


def compare(
    expected: Snapshot,
    actual: Snapshot,
    *,
    rank: int,
    step: int,
    tolerance: float | None = None,
    floor: float = 0.0,
    drift: float = 0.0,
) -> StepParity:
    """Compare one step.

    Args:
        expected: the twin's.
        actual: the variant's.
        rank, step: recorded with differences; steps count from 0.
        tolerance: largest accepted |actual - expected| / max|expected| of a floating-point tensor;
            None asks for equal bits.
        floor: what stands for max|expected| at least, as a share of the largest value of the whole part: a
            gradient that is zero but for rounding has no scale of its own.
        drift: accepted difference of a parameter with such a gradient: an optimizer that divides gradients
            by their own size makes whole steps of rounding. Only with a tolerance.
    """
    idle = _without_scale(expected.gradients, tolerance, floor)
    parts = {
        part: _compare_part(
            getattr(expected, part),
            getattr(actual, part),
            (rank, step),
            (tolerance, floor),
            dict.fromkeys(idle if part == "parameters" else (), drift),
        )
        for part in PARTS
    }
    level = "bitwise" if tolerance is None else "tolerance"
    return StepParity(parts=parts, loss=actual.loss["loss"].value.item(), level=level)


def summarise(compared: Sequence[StepParity]) -> Parity:
    """Merge the steps: equal when all are, the largest distances, the earliest difference.

    Raises:
        ValueError: nothing was compared, which proves nothing.
    """
    if not compared:
        raise ValueError("parity: needs at least one compared step, got none")
    merged = {part: _merge([step.parts[part] for step in compared]) for part in PARTS}
    return Parity(
        level=compared[0].level,
        steps=len(compared),
        losses=tuple(step.loss for step in compared),
        **merged,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Finding:
    """Comparison of one leaf; `first` is (index, expected, actual) of the first difference."""

    max_abs: float = 0.0
    max_rel: float = 0.0
    first: tuple[tuple[int, ...] | None, float | str, float | str] | None = None


def _merge(parts: Sequence[PartParity]) -> PartParity:
    return PartParity(
        equal=all(part.equal for part in parts),
        max_abs=max(part.max_abs for part in parts),
        max_rel=max(part.max_rel for part in parts),
        first_difference=next((part.first_difference for part in parts if part.first_difference), None),
    )


def _compare_part(
    expected: Leaves,
    actual: Leaves,
    at: tuple[int, int],
    declared: tuple[float | None, float],
    drifts: Mapping[str, float],
) -> PartParity:
    (rank, step), (tolerance, floor) = at, declared
    least_scale = floor * _largest(expected) if tolerance is not None and floor else 0.0
    # a drift is a number, like the largest difference that a tolerance accepts
    scales = {name: max(least_scale, drift / tolerance) for name, drift in drifts.items() if tolerance}
    findings = list(_findings(expected, actual, tolerance, (least_scale, scales)))
    first = next(((name, finding.first) for name, finding in findings if finding.first), None)
    return PartParity(
        equal=first is None,
        max_abs=max((finding.max_abs for _, finding in findings), default=0.0),
        max_rel=max((finding.max_rel for _, finding in findings), default=0.0),
        first_difference=first
        and Difference(
            name=first[0], index=first[1][0], rank=rank, step=step, expected=first[1][1], actual=first[1][2]
        ),
    )


def _without_scale(gradients: Leaves, tolerance: float | None, floor: float) -> list[str]:
    """Return the names of the gradients that are zero but for rounding."""
    if tolerance is None or not floor:
        return []
    limit = tolerance * floor * _largest(gradients)
    return [
        name
        for name, leaf in gradients.items()
        if isinstance(leaf, Captured) and _largest({name: leaf}) <= limit
    ]


def _largest(leaves: Leaves) -> float:
    values = [leaf.value for leaf in leaves.values() if isinstance(leaf, Captured)]
    return max((_magnitude(value).max().item() for value in values if value.numel()), default=0.0)


def _findings(
    expected: Leaves,
    actual: Leaves,
    tolerance: float | None,
    least_scales: tuple[float, Mapping[str, float]],
) -> Iterator[tuple[str, _Finding]]:
    usual, scales = least_scales
    for name, leaf in expected.items():
        if name in actual:
            yield name, _compare_leaf(leaf, actual[name], tolerance, scales.get(name, usual))
        else:
            yield name, _Finding(first=(None, _describe(leaf), "absent"))
    for name in [name for name in actual if name not in expected]:
        yield name, _Finding(first=(None, "absent", _describe(actual[name])))
    for position, (name, other) in enumerate(zip(expected, actual, strict=False)):  # lengths: seen above
        if name != other:
            yield name, _Finding(first=(None, f"{name!r} at position {position}", f"{other!r} there"))
            return


def _compare_leaf(expected: Any, actual: Any, tolerance: float | None, least_scale: float) -> _Finding:
    if not (isinstance(expected, Captured) and isinstance(actual, Captured)):
        same = _is_same_value(expected, actual)
        return _Finding() if same else _Finding(first=(None, _describe(expected), _describe(actual)))
    if str(expected) != str(actual):
        return _Finding(first=(None, str(expected), str(actual)))
    one, other = expected.value, actual.value.to(expected.value.device)
    if torch.equal(_bits(one), _bits(other)):
        return _Finding()
    return _measure(one, other, tolerance, least_scale)


def _is_same_value(expected: Any, actual: Any) -> bool:
    if type(expected) is not type(actual):
        return False
    if has_identity_only(expected):  # which differs between any two models
        return True
    is_nan = expected != expected and actual != actual  # noqa: PLR0124 (the definition of NaN, for any type)
    return bool(expected == actual or is_nan)


def _describe(leaf: Any) -> str:
    if leaf is None or isinstance(leaf, Captured):
        return str(leaf)
    return f"{type(leaf).__qualname__} {leaf}"


def _measure(expected: Tensor, actual: Tensor, tolerance: float | None, least_scale: float) -> _Finding:
    """Measure how far two tensors of one shape and dtype, known to differ in bits, are apart."""
    max_abs, scale = 0.0, 0.0
    for _, one, other in _blocks(expected, actual):
        max_abs = max(max_abs, _distance(one, other).max().item())
        scale = max(scale, _magnitude(one).max().item())
    max_rel = 0.0 if max_abs == 0 else max_abs / scale if scale else float("inf")
    is_number = expected.is_floating_point() or expected.is_complex()
    limit = tolerance * max(scale, least_scale) if tolerance is not None and is_number else None
    if limit is not None and max_abs <= limit:
        return _Finding(max_abs=max_abs, max_rel=max_rel)
    return _Finding(max_abs=max_abs, max_rel=max_rel, first=_first_beyond(expected, actual, limit))


def _first_beyond(
    expected: Tensor, actual: Tensor, limit: float | None
) -> tuple[tuple[int, ...], float | str, float | str]:
    """Return index and values of the first element further apart than `limit`; None asks for equal bits."""
    for start, one, other in _blocks(expected, actual):
        beyond = _differ(one, other) if limit is None else _distance(one, other) > limit
        if beyond.any():
            position = int(beyond.nonzero()[0].item())
            index = tuple(int(i) for i in torch.unravel_index(torch.tensor(start + position), expected.shape))
            return index, _number(one[position]), _number(other[position])
    raise AssertionError("called on tensors that do not differ")


def _blocks(expected: Tensor, actual: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    pieces = zip(expected.reshape(-1).split(_BLOCK), actual.reshape(-1).split(_BLOCK), strict=True)
    for number, (one, other) in enumerate(pieces):
        yield number * _BLOCK, one, other


def _bits(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.view(_SAME_SIZE_INTEGER[real.element_size()])


def _differ(expected: Tensor, actual: Tensor) -> Tensor:
    different = _bits(expected) != _bits(actual)
    return different.any(dim=-1) if expected.is_complex() else different


def _distance(expected: Tensor, actual: Tensor) -> Tensor:
    """Return |actual - expected| in float64: 0 where bits or NaN agree, infinite where only one is finite."""
    distance = (_wide(actual) - _wide(expected)).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    agree = ~_differ(expected, actual) | (expected.isnan() & actual.isnan())
    return distance.masked_fill(agree, 0.0)


def _magnitude(tensor: Tensor) -> Tensor:
    return _wide(tensor).abs().nan_to_num(nan=0.0, posinf=0.0)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _number(element: Tensor) -> float | str:
    value = element.item()
    return str(value) if isinstance(value, complex) else value
