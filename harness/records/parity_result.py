"""The result of a parity comparison, torch-free, and its sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.records.fields import encode

PARTS: Mapping[str, str] = {
    "outputs": "output",
    "loss": "loss",
    "gradients": "gradient of",
    "buffers": "buffer",
    "rng_state": "RNG state",
    "parameters": "parameter",
}
"""The compared parts of a training step, in the order they come to be, and how a sentence names one item."""

_LEAST_DIGITS = 4
_MOST_DIGITS = 17  # enough to tell any two float64 apart


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstDifference:
    """The first thing that is not equal.

    Fields:
        name: FQN, output path or generator.
        index: position in the rank's local tensor; None when something else than a value differs.
        rank, step: where it was seen; steps count from 0.
        expected, actual: the twin's and the variant's value, or a description of them.
    """

    name: str
    index: tuple[int, ...] | None
    rank: int
    step: int
    expected: float | str
    actual: float | str


@dataclass(frozen=True, kw_only=True, slots=True)
class PartParity:
    """How one part of the step compares over all its tensors and steps.

    Fields:
        equal: bit for bit, or within the declared tolerance.
        max_abs: largest |actual - expected|; infinite where only one side is finite.
        max_rel: largest |actual - expected| / max|expected| of one tensor.
        first_difference: earliest step first; None when equal.

    What has no distance (another shape, something absent) shows in `equal` and `first_difference` only.
    """

    equal: bool = True
    max_abs: float = 0.0
    max_rel: float = 0.0
    first_difference: FirstDifference | None = None


def merge_parts(parts: Sequence[PartParity]) -> PartParity:
    """Return one part of several steps or ranks as one: the earliest difference, the largest distances."""
    differences = [part.first_difference for part in parts if part.first_difference is not None]
    return PartParity(
        equal=all(part.equal for part in parts),
        max_abs=_worst([part.max_abs for part in parts]),
        max_rel=_worst([part.max_rel for part in parts]),
        first_difference=min(differences, key=lambda first: (first.step, first.rank), default=None),
    )


def _worst(values: Sequence[float]) -> float:
    """Return the largest value; NaN, which no order knows, is worse than any number."""
    return math.nan if any(math.isnan(value) for value in values) else max(values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """What was compared with what, and what was accepted.

    Fields:
        variant, baseline: strategies of the two, `ac=full chunk=none shard=megatron`.
        dtype, optimizer: dtype and optimizer of both.
        relative: largest accepted |actual - expected| / max|expected| of one tensor; `None` where all bits
            must be equal.
        parameters: the same of parameters, where it is another.
        floor: share of the largest tensor of a part below which no tensor's own size counts.
    """

    variant: str
    baseline: str
    dtype: str
    optimizer: str
    relative: float | None = None
    parameters: float | None = None
    floor: float | None = None

    def __str__(self) -> str:
        return f"{self.variant} against {self.baseline} in {self.dtype}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parity:
    """Variant against twin over all parity steps, as one rank saw it.

    Fields:
        level: `bitwise`, or `tolerance` when a strategy between the variant and the end of the chain declares
            one.
        steps: optimizer steps compared.
        losses: the variant's loss after each step.
        compared: the two; `None` in records of earlier versions.
        chain: what the twin itself was compared with, so that all together reach from the variant to the
            plain model on the same mesh; empty where the twin is that.
    """

    level: str
    steps: int
    outputs: PartParity
    loss: PartParity
    gradients: PartParity
    buffers: PartParity
    rng_state: PartParity
    parameters: PartParity
    losses: tuple[float, ...]
    compared: Compared | None = None
    chain: tuple[Parity, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Say whether every part is equal, here and along the chain."""
        return all(getattr(self, part).equal for part in PARTS) and all(each.is_equal for each in self.chain)

    def differences(self) -> Iterator[str]:
        """Yield the sentence about the first difference of each part, then those of the chain."""
        for link in (self, *self.chain):
            for part in PARTS:
                difference = getattr(link, part).first_difference
                if difference is not None:
                    where = "" if link is self else f" ({link.compared})"
                    yield describe_difference(part, difference) + where

    def as_json(self) -> dict[str, Any]:
        """Return plain values; what JSON lacks becomes text: `inf`, `-inf` and `nan`."""
        plain: dict[str, Any] = encode(self)
        return plain


def describe_difference(part: str, difference: FirstDifference) -> str:
    """Return the sentence about `difference`, with digits enough to tell the two values apart.

    For example `parity: gradient of 'norm.weight' differs first at (3, 17) on rank 1: 0.1250 vs 0.1252`.
    """
    where = f" first at {tuple(difference.index)}" if difference.index else ""
    expected, actual = _as_text(difference.expected, difference.actual)
    item = f"{PARTS[part]} {difference.name!r}"
    return f"parity: {item} differs{where} on rank {difference.rank}: {expected} vs {actual}"


def _as_text(expected: float | str, actual: float | str) -> tuple[str, str]:
    if not (isinstance(expected, float) and isinstance(actual, float)):
        return str(expected), str(actual)
    for digits in range(_LEAST_DIGITS, _MOST_DIGITS):
        if (short := f"{expected:#.{digits}g}") != (other := f"{actual:#.{digits}g}"):
            return short, other
    return repr(expected), repr(actual)
