"""Parity: does the variant compute what its twin computes, bit for bit.

Compared are names and their order, classes, shapes, dtypes, devices, absence, and the bits of every value:
-0.0 is not 0.0, and a NaN equals the same NaN in the same place. A declared tolerance loosens the values of
floating-point tensors, nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from harness.measure.parity.snapshot import Captured, Leaves, Snapshot, has_identity_only, steps
from harness.records.parity_result import (
    PARTS,
    FirstDifference,
    Parity,
    PartParity,
    Weightless,
    first_of,
    joined,
    merge_parts,
)
from strategies.base import Tolerance

__all__ = ["Snapshot", "StepParity", "compare", "compare_steps", "steps", "summarise"]

_BLOCK = 1 << 20
"""Elements measured at a time: distances need several float64 temporaries, which should stay in a cache."""

_SAME_SIZE_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParity:
    """One step of the variant against the same step of the twin.

    Fields:
        parts: every key of `PARTS`.
        loss: the variant's; `None` on a rank that computes none.
        absent: parts that one of the two does not have, so that they are not compared.
        uncompared: paths of what modules of one of the two hold and nothing can be read of.
        level: `bitwise` or `tolerance`.
        blocks: whether gradients of each block differ, in the model's order.
        not_finite: name of the first gradient in backward that is NaN or infinite, where both are equal.
        has_gradient: whether a gradient is anything but zero.
        has_block_gradient: the same inside what the variant recomputes; true where that has no parameter to
            train.
    """

    parts: Mapping[str, PartParity]
    absent: tuple[str, ...]
    uncompared: tuple[str, ...]
    loss: float | None
    level: str
    blocks: Mapping[str, bool]
    not_finite: str | None
    has_gradient: bool
    has_block_gradient: bool


def compare_steps(
    expected: Iterator[Snapshot],
    actual: Iterator[Snapshot],
    *,
    count: int,
    rank: int = 0,
    tolerance: Tolerance | None = None,
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
            compared.append(compare(next(expected), next(actual), rank=rank, step=step, tolerance=tolerance))
        except StopIteration as end:
            raise ValueError(f"parity: asked for {count} steps, but only {step} were trained") from end
    return summarise(compared)


def compare(
    expected: Snapshot, actual: Snapshot, *, rank: int, step: int, tolerance: Tolerance | None = None
) -> StepParity:
    """Compare one step.

    Args:
        rank, step: recorded with differences; steps count from 0.
        tolerance: None asks for equal bits.
    """
    absent = ("outputs",) if expected.outputs is None or actual.outputs is None else ()
    limits = {part: _limits(tolerance, part, expected) for part in PARTS}
    if tolerance is not None and tolerance.stride:
        idle = frozenset(_without_scale(expected.gradients, limits["gradients"]))
        drifting = limits["parameters"]
        assert drifting is not None
        limits["parameters"] = replace(drifting, drift=(step + 1) * tolerance.stride, drifting=idle)
    changed = expected.changed_state | actual.changed_state
    findings = {
        part: []
        if part in absent
        else _in_order(
            _findings(_leaves(expected, part, changed), _leaves(actual, part, changed), limits[part]),
            expected.backward_order if part == "gradients" else (),
        )
        for part in PARTS
    }
    differing = frozenset(name for name, finding in findings["gradients"] if finding.first)
    largest = _largest(expected)
    return StepParity(
        parts={part: _part_parity(found, rank, step) for part, found in findings.items()},
        absent=absent,
        uncompared=joined([expected.uncompared, actual.uncompared]),
        loss=sum(part.value.item() for part in actual.loss.values()) if actual.loss else None,
        level="bitwise" if tolerance is None else "tolerance",
        blocks={fqn: not names.isdisjoint(differing) for fqn, names in expected.blocks.items()},
        not_finite=next((name for name, value in largest.items() if not math.isfinite(value)), None),
        has_gradient=any(largest.values()),
        has_block_gradient=not actual.checkpointed
        or any(largest.get(each, 0) for each in actual.checkpointed),
    )


def summarise(compared: Sequence[StepParity]) -> Parity:
    """Merge the steps: equal when all are, the largest distances, the earliest difference.

    Raises:
        ValueError: nothing was compared, which proves nothing.
    """
    if not compared:
        raise ValueError("parity: needs at least one compared step, got none")
    merged: dict[str, Any] = {part: merge_parts([step.parts[part] for step in compared]) for part in PARTS}
    first = first_of(merged, {})
    return Parity(
        level=compared[0].level,
        steps=len(compared),
        first=first and first_of(merged, compared[first.step].blocks),
        absent=compared[0].absent,
        uncompared=joined(step.uncompared for step in compared),
        losses=tuple(step.loss for step in compared if step.loss is not None),
        weightless=_weightless(compared),
        **merged,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Limits:
    """The limit of one part: `relative` of a tensor's largest value, or of `least` if that is larger.

    Tensors named in `drifting` may be apart by `drift`, too.
    """

    relative: float
    least: float
    drift: float = 0.0
    drifting: frozenset[str] = frozenset()

    def of(self, name: str, scale: float) -> float:
        """Return the largest accepted distance in the tensor `name`, whose largest value is `scale`."""
        usual = self.relative * max(scale, self.least)
        return max(usual, self.drift) if name in self.drifting else usual


@dataclass(frozen=True, kw_only=True, slots=True)
class _Finding:
    """Comparison of one leaf; `first` is (index, expected, actual) of the first difference."""

    max_abs: float = 0.0
    max_rel: float = 0.0
    first: tuple[tuple[int, ...] | None, float | str, float | str] | None = None


_Named: TypeAlias = tuple[str, _Finding]
"""Name of a leaf, and how it compares."""


def _limits(tolerance: Tolerance | None, part: str, expected: Snapshot) -> _Limits | None:
    """Return how far tensors of a part may differ, `None` where all bits must be equal."""
    if tolerance is None:
        return None
    is_loosened = part == "parameters" and tolerance.parameters is not None
    relative = tolerance.parameters if is_loosened else tolerance.relative
    assert relative is not None
    if tolerance.floor == 0:
        return _Limits(relative=relative, least=0.0)
    leaves: Leaves = getattr(expected, part) or {}
    captured = [leaf for leaf in leaves.values() if isinstance(leaf, Captured)]
    scales = [_scale(leaf.value) for leaf in captured if _is_number(leaf.value)]
    return _Limits(relative=relative, least=tolerance.floor * max(scales, default=0.0))


def _without_scale(gradients: Leaves, limits: _Limits | None) -> Iterator[str]:
    least = 0.0 if limits is None else limits.relative * limits.least
    for name, leaf in gradients.items():
        if isinstance(leaf, Captured) and _is_number(leaf.value) and _scale(leaf.value) <= least:
            yield name


def _leaves(snapshot: Snapshot, part: str, changed: frozenset[str]) -> Leaves:
    """Return the leaves of a part that are compared: of the state of modules those that steps change."""
    leaves: Leaves = getattr(snapshot, part)
    if part != "state":
        return leaves
    return {name: leaf for name, leaf in leaves.items() if name in changed}


def _in_order(findings: Iterable[_Named], order: Sequence[str]) -> list[_Named]:
    """Return findings in the order of time; what `order` does not name comes last."""
    places = {name: place for place, name in enumerate(order)}
    return sorted(findings, key=lambda found: places.get(found[0], len(places)))


def _part_parity(findings: Sequence[_Named], rank: int, step: int) -> PartParity:
    first = next(
        (
            FirstDifference(
                name=name,
                index=finding.first[0],
                rank=rank,
                step=step,
                expected=finding.first[1],
                actual=finding.first[2],
                position=position,
            )
            for position, (name, finding) in enumerate(findings)
            if finding.first
        ),
        None,
    )
    return PartParity(
        equal=first is None,
        max_abs=max((finding.max_abs for _, finding in findings), default=0.0),
        max_rel=max((finding.max_rel for _, finding in findings), default=0.0),
        first_difference=first,
    )


def _largest(snapshot: Snapshot) -> dict[str, float]:
    ordered = dict.fromkeys((*snapshot.backward_order, *snapshot.gradients))
    leaves = ((name, snapshot.gradients.get(name)) for name in ordered)
    return {
        name: leaf.value.abs().max().item()
        for name, leaf in leaves
        if isinstance(leaf, Captured) and _is_number(leaf.value) and leaf.value.numel()
    }


def _weightless(compared: Sequence[StepParity]) -> Weightless:
    broken = ((step, each.not_finite) for step, each in enumerate(compared) if each.not_finite is not None)
    first, name = next(broken, (None, None))
    return Weightless(
        not_finite_from=first,
        not_finite=name,
        zero_from=_from_which(not each.has_gradient for each in compared),
        zero_blocks_from=_from_which(not each.has_block_gradient for each in compared),
    )


def _from_which(holds: Iterable[bool]) -> int | None:
    """Return the step from which on something holds to the end; `None` where it does not hold there."""
    steps = list(holds)
    beginning = max((step + 1 for step, each in enumerate(steps) if not each), default=0)
    return beginning if beginning < len(steps) else None


def _findings(expected: Leaves, actual: Leaves, limits: _Limits | None) -> Iterator[_Named]:
    """Yield each leaf with how it compares; those absent on one side, and another order, are differences."""
    for name, leaf in expected.items():
        if name in actual:
            yield name, _compare_leaf(name, leaf, actual[name], limits)
        else:
            yield name, _Finding(first=(None, _describe(leaf), "absent"))
    for name in [name for name in actual if name not in expected]:
        yield name, _Finding(first=(None, "absent", _describe(actual[name])))
    for position, (name, other) in enumerate(zip(expected, actual, strict=False)):  # lengths: seen above
        if name != other:
            yield name, _Finding(first=(None, f"{name!r} at position {position}", f"{other!r} there"))
            return


def _compare_leaf(name: str, expected: Any, actual: Any, limits: _Limits | None) -> _Finding:
    """Return how one leaf compares: bit by bit, then within the limits."""
    if not (isinstance(expected, Captured) and isinstance(actual, Captured)):
        same = _is_same_value(expected, actual)
        return _Finding() if same else _Finding(first=(None, _describe(expected), _describe(actual)))
    if str(expected) != str(actual):
        return _Finding(first=(None, str(expected), str(actual)))
    one, other = expected.value, actual.value.to(expected.value.device)
    if torch.equal(_bits(one), _bits(other)):
        return _Finding()
    return _measure(one, other, partial(limits.of, name) if limits is not None and _is_number(one) else None)


def _is_same_value(expected: Any, actual: Any) -> bool:
    """Return whether two values that are no tensors are equal, NaN included."""
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


def _measure(expected: Tensor, actual: Tensor, limit_of: Callable[[float], float] | None) -> _Finding:
    """Measure how far two tensors of one shape and dtype, known to differ in bits, are apart."""
    distances = (_distance(one, other).max().item() for _, one, other in _blocks(expected, actual))
    max_abs, scale = max(distances), _scale(expected)
    max_rel = 0.0 if max_abs == 0 else max_abs / scale if scale else float("inf")
    limit = None if limit_of is None else limit_of(scale)
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


def _scale(tensor: Tensor) -> float:
    """Return the largest finite magnitude; 0 where there is none."""
    pieces = (piece for piece in tensor.reshape(-1).split(_BLOCK) if piece.numel())
    return max(
        (_wide(piece).abs().nan_to_num(nan=0.0, posinf=0.0).max().item() for piece in pieces), default=0.0
    )


def _is_number(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _number(element: Tensor) -> float | str:
    value = element.item()
    return str(value) if isinstance(value, complex) else value
