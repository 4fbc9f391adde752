"""The result of a parity comparison, torch-free, and its sentences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import itemgetter
from typing import Any

from harness.records.fields import encode

PARTS: Mapping[str, str] = {
    "outputs": "output",
    "loss": "loss",
    "gradients": "gradient of",
    "input_gradients": "gradient of input",
    "buffers": "buffer",
    "state": "state",
    "rng_state": "RNG state",
    "parameters": "parameter",
}
"""The compared parts of a training step, in the order they come to be, and how a sentence names one item."""

_GRADIENTS = ("gradients", "input_gradients")
_MOST_BLOCKS = 6
"""Blocks that a sentence names; of more it names the first and the last."""
_TOPIC = "parity: "
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
        position: place of `name` in its part, in the order of time; backward makes the gradients of the last
            modules first.
    """

    name: str
    index: tuple[int, ...] | None
    rank: int
    step: int
    expected: float | str
    actual: float | str
    position: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class First(FirstDifference):
    """The first difference in time: by step, then by the order of `PARTS`, then by position.

    Fields:
        part: key of `PARTS`.
        blocks: where it is a gradient, whether gradients of each block differ in that step, in the model's
            order; the last that differs is next to the cause, because backward carries a difference on to the
            blocks before. Empty otherwise.
    """

    part: str
    blocks: dict[str, bool] = field(default_factory=dict)

    def __str__(self) -> str:
        return describe_difference(self.part, self) + self._where()

    def _where(self) -> str:
        """Return in which blocks gradients differ, for the end of a sentence."""
        differing = [name for name, differs in self.blocks.items() if differs]
        equal = [name for name, differs in self.blocks.items() if not differs]
        if not self.blocks:
            return ""
        if not differing:
            return "; gradients of no block differ"
        if not equal:
            return "; gradients differ in every block"
        return f"; gradients differ in {_listed(differing)}, not in {_listed(equal)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PartParity:
    """The comparison of one part of the step over all its tensors and steps.

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
        first_difference=min(
            differences, key=lambda first: (first.step, first.position, first.rank), default=None
        ),
    )


def first_of(parts: Mapping[str, PartParity], blocks: Mapping[str, bool]) -> First | None:
    """Return the first difference in time; `None` where all parts are equal.

    Args:
        parts: how each part compares, over all steps.
        blocks: whether gradients of each block differ in the step in which a part differs first.
    """
    found = [
        (difference.step, place, difference, part)
        for place, part in enumerate(PARTS)
        if (difference := parts[part].first_difference) is not None
    ]
    if not found:
        return None
    _, _, difference, part = min(found, key=itemgetter(0, 1))
    values = {each.name: getattr(difference, each.name) for each in fields(FirstDifference)}
    return First(part=part, blocks=dict(blocks) if part in _GRADIENTS else {}, **values)


def _worst(values: Sequence[float]) -> float:
    """Return the largest value; NaN, which no order knows, is worse than any number."""
    return math.nan if any(math.isnan(value) for value in values) else max(values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """The pair that was compared, and the difference that was accepted.

    Fields:
        variant, baseline: strategies of the two, `ac=full chunk=none shard=megatron`.
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
class Weightless:
    """Facts that make equal gradients prove nothing; steps count from 0, `None` stands for none.

    Fields:
        not_finite_from: first step with a gradient that is NaN or infinite on both sides.
        not_finite: name of the first such gradient in backward.
        zero_from: step from which on no gradient is anything but zero or absent.
        zero_blocks_from: the same of the gradients inside the blocks that are checkpointed, where those have
            any to expect.
    """

    not_finite_from: int | None = None
    not_finite: str | None = None
    zero_from: int | None = None
    zero_blocks_from: int | None = None

    def __str__(self) -> str:
        """Return why equal gradients prove nothing; empty where they prove something."""
        if self.not_finite_from is not None:
            return (
                f"gradients are not finite on both sides from step {self.not_finite_from} on, first that of "
                f"{self.not_finite!r}: equal NaN and infinities prove nothing"
            )
        if self.zero_from is not None:
            return f"all gradients are zero or absent on both sides from step {self.zero_from} on"
        if self.zero_blocks_from is not None:
            return (
                "the gradients inside every checkpointed block are zero or absent on both sides from step "
                f"{self.zero_blocks_from} on, so nothing shows what was recomputed there"
            )
        return ""


def merge_weightless(ranks: Sequence[Weightless]) -> Weightless:
    """Return what several ranks say as one: a gradient that is not finite on any, zero where it is on all."""
    broken = [rank for rank in ranks if rank.not_finite_from is not None]
    first = min(broken, key=lambda rank: rank.not_finite_from or 0, default=Weightless())
    return Weightless(
        not_finite_from=first.not_finite_from,
        not_finite=first.not_finite,
        zero_from=_last([rank.zero_from for rank in ranks]),
        zero_blocks_from=_last([rank.zero_blocks_from for rank in ranks]),
    )


def _last(steps: Sequence[int | None]) -> int | None:
    """Return the last of the steps, `None` where one is missing."""
    known = [step for step in steps if step is not None]
    return max(known) if known and len(known) == len(steps) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Parity:
    """Variant against twin over all parity steps, as one rank saw it.

    Fields:
        level: `bitwise`, or `tolerance` when a strategy between the variant and the end of the chain declares
            one.
        first: the first difference in time; `None` where all parts are equal.
        absent: parts that are not compared, because one of the two never has them as wholes.
        uncompared: what modules hold and nothing can be read of, so that `state` lacks it: paths,
            each with its type, such as `blocks.0.lock (lock)`.
        losses: the variant's loss after each step.
        weightless: what makes equal gradients prove nothing.
        control: the plain model compared with itself, in fresh instances, up to the step that differs first;
            `None` where nothing differs.
        compared: the two; `None` in records of earlier versions.
        chain: what the twin itself was compared with, so that all together reach from the variant to the
            plain model on the same mesh, and from there to the dense model where the mesh has `tp`; empty
            where the twin is that.
        first_module: FQN of the first module with an output that is not the dense model's, in the order in
            which they end; empty where there is none, or the baseline is another.
        unreached: why the chain does not reach the dense model; `None` where it does, or there is no `tp`.
    """

    level: str
    steps: int
    first: First | None = None
    outputs: PartParity
    loss: PartParity
    gradients: PartParity
    input_gradients: PartParity = PartParity()
    buffers: PartParity
    state: PartParity = PartParity()
    rng_state: PartParity
    parameters: PartParity
    losses: tuple[float, ...]
    absent: tuple[str, ...] = ()
    uncompared: tuple[str, ...] = ()
    weightless: Weightless = Weightless()
    control: Parity | None = None
    compared: Compared | None = None
    chain: tuple[Parity, ...] = ()
    first_module: str = ""
    unreached: str | None = None

    @property
    def is_equal(self) -> bool:
        """Say whether every part is equal, here and along the chain."""
        return not any(link.differing for link in self.links)

    @property
    def links(self) -> tuple[Parity, ...]:
        """This link and those of the chain."""
        return (self, *self.chain)

    @property
    def differing(self) -> tuple[str, ...]:
        """The parts that are not equal in this link, in the order of `PARTS`."""
        return tuple(part for part in PARTS if not getattr(self, part).equal)

    @property
    def blamed(self) -> tuple[str, ...]:
        """The parts whose difference is the variant's.

        None where the plain model does not repeat itself. State alone that it does not repeat, such as a time
        of day, changes nothing that is computed and is left out.
        """
        drifting = () if self.control is None else self.control.differing
        if drifting in ((), ("state",)):
            return tuple(part for part in self.differing if part not in drifting)
        return ()

    @property
    def unrepeated(self) -> str | None:
        """The difference of the plain model from itself, where that keeps the variant from being blamed."""
        for link in self.links:
            if link.control is not None and link.differing and not link.blamed:
                what = (
                    "" if link.control.first is None else f": {str(link.control.first).removeprefix(_TOPIC)}"
                )
                if link.control.differing != ("state",):
                    return f"the plain model does not repeat itself{what}"
        return None

    @property
    def unproven(self) -> str | None:
        """Why equality proves nothing."""
        return next((str(link.weightless) for link in self.links if str(link.weightless)), self.unreached)

    def differences(self) -> Iterator[str]:
        """Yield a sentence for each link that differs: its first difference in time, then what else does."""
        for link in self.links:
            if link.first is not None:
                where = "" if link is self else f" ({link.compared})"
                yield f"{link.first}{_later(link)}{_module(link)}{where}"

    def as_json(self) -> dict[str, Any]:
        """Return plain values; what JSON lacks becomes text: `inf`, `-inf` and `nan`."""
        plain: dict[str, Any] = encode(self)
        return plain


def joined(several: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return every name in `several` once, in order of appearance."""
    return tuple(dict.fromkeys(name for names in several for name in names))


def describe_difference(part: str, difference: FirstDifference) -> str:
    """Return the sentence about `difference`, with digits enough to tell the two values apart.

    For example
    `parity: gradient of 'norm.weight' differs first at (3, 17) on rank 1 in step 0: 0.1250 vs 0.1252`.
    """
    where = f" first at {tuple(difference.index)}" if difference.index else ""
    seen = f"on rank {difference.rank} in step {difference.step}"
    expected, actual = _as_text(difference.expected, difference.actual)
    item = f"{PARTS[part]} {difference.name!r}"
    return f"{_TOPIC}{item} differs{where} {seen}: {expected} vs {actual}"


def _later(link: Parity) -> str:
    others = [
        f"{part.replace('_', ' ')} (step {difference.step})"
        for part in PARTS
        if link.first is not None
        and part != link.first.part
        and (difference := getattr(link, part).first_difference) is not None
    ]
    return f"; then {', '.join(others)}" if others else ""


def _module(link: Parity) -> str:
    return f"; the first module with a wrong output is {link.first_module!r}" if link.first_module else ""


def _listed(blocks: Sequence[str]) -> str:
    if len(blocks) > _MOST_BLOCKS:
        return f"{blocks[0]} … {blocks[-1]} ({len(blocks)} blocks)"
    return ", ".join(blocks)


def _as_text(expected: float | str, actual: float | str) -> tuple[str, str]:
    """Return two values with as many digits as tell them apart."""
    if not (isinstance(expected, float) and isinstance(actual, float)):
        return str(expected), str(actual)
    for digits in range(_LEAST_DIGITS, _MOST_DIGITS):
        if (short := f"{expected:#.{digits}g}") != (other := f"{actual:#.{digits}g}"):
            return short, other
    return repr(expected), repr(actual)
