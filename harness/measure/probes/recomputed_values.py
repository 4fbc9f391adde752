"""Every value that a recomputation makes, against those that forward made: the first that is another.

A digest of each result of each operator is kept in forward. What is recomputed in backward is looked up among
those of the same operator. Which of two calls is repeated does not matter, nor that a save list leaves out
operators, nor that the results are used by nobody: a difference here is a fact about a recomputation, and
gradients say whether it matters.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.measure.gloo.wait import settled_collectives
from harness.measure.memory.locator import Locator
from harness.measure.parity.checksum import checksum
from harness.measure.rng import seeded
from harness.measure.trainee import Trainee
from strategies.estimate.tensors import plain_tensors, tensors_in
from strategies.step.operator_mode import OperatorMode

_aten = torch.ops.aten
_COPIES = (
    *("aten.detach", "aten.alias", "aten.clone", "aten.copy_", "aten.lift", "prim."),
    "aten.as_strided.default",  # how a plan lays out what it kept; what reads it there is looked up
    *("c10d", "_c10d_functional"),  # what has not arrived yet holds anything
)
_UNWRITTEN = ("aten.empty", "aten.new_empty", "aten.resize", "aten.set_")
"""Operators of bookkeeping, which forward need not have run, and those whose results hold nothing yet."""

_CHOICES = frozenset({_aten.topk.default})


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """The first value that a recomputation made and forward did not.

    Fields:
        operator: operator that made it, such as `aten.bernoulli_.float`.
        module: FQN of the module that ran the operator.
        call: how often the module had run the operator in recomputations before.
        has_run: whether forward has run the operator at all.
    """

    operator: str
    module: str
    call: int
    shape: tuple[int, ...]
    has_run: bool

    def __str__(self) -> str:
        what = "gives another value than in forward" if self.has_run else "did not run in forward"
        return f"{self.operator} in {self.module!r} (call {self.call}, shape {self.shape}) {what}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Margin:
    """The distance of a largest value to the second largest.

    Fields:
        module: FQN of the module that chooses, such as a router.
        margin: smallest distance of a chosen number to the next one that was not.
        noise: largest distance of a recomputed number to forward's; a choice may flip from half of `margin`.
    """

    module: str
    margin: float
    noise: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputedValues:
    """The findings about the recomputations of one step.

    Fields:
        operators: those that ran again, by name, in order of first appearance.
        count: values that were looked up.
        first: the first divergence; `None` where there is none.
        margins: margin of each `topk`, in the order of forward.
    """

    operators: tuple[str, ...]
    count: int
    first: Divergence | None
    margins: tuple[Margin, ...] = ()
    forward_operators: tuple[str, ...] = ()


def recomputed_values(
    trainee: Trainee, batch: Any, *, seed: int, device: torch.device, dp_rank: int = 0
) -> RecomputedValues:
    """Return how the recomputations of one step of `trainee` compare with its forward.

    Args:
        trainee: the variant; it takes no optimizer step.
        batch: what it reads, on `device`.
        dp_rank: index of the rank's batch among all data-parallel ones.
    """
    locator = Locator(trainee.model, {})
    values = _Values(locator)
    with seeded(seed, step=0, dp_rank=dp_rank, device=device), settled_collectives(), locator, values:
        trainee.zero_grad()
        _, loss = trainee.forward(batch)
        locator.phase = "backward"
        trainee.backward(loss)
    trainee.zero_grad()
    return values.report()


class _Values(OperatorMode):
    def __init__(self, locator: Locator) -> None:
        super().__init__()
        self._locator = locator
        self._known: defaultdict[str, set[tuple[Any, ...]]] = defaultdict(set)
        self._runs: Counter[tuple[str, str]] = Counter()
        self._count = 0
        self._first: Divergence | None = None
        self._choices: list[tuple[str, Tensor, int]] = []
        self._noise: dict[int, float] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `func` and note or look up what it gives."""
        result = func(*args, **kwargs)
        name = str(func)
        if name.startswith((*_COPIES, *_UNWRITTEN)):
            return result
        if self._locator.phase == "forward":
            self._known[name].update(map(_digest, plain_tensors(tensors_in(result))))
            if func in _CHOICES:
                self._choices.append((self._locator.module, _ranked(*args, **kwargs).clone(), args[1]))
        elif self._locator.is_recomputing:
            self._look_up(name, result)
            if func in _CHOICES:
                self._measure(_ranked(*args, **kwargs))
        return result

    def report(self) -> RecomputedValues:
        """Return what was seen."""
        margins = tuple(
            Margin(module=module, margin=_margin(scores, chosen), noise=self._noise.get(place, 0.0))
            for place, (module, scores, chosen) in enumerate(self._choices)
        )
        operators = tuple(dict.fromkeys(operator for operator, _ in self._runs))
        return RecomputedValues(
            operators=operators,
            count=self._count,
            first=self._first,
            margins=margins,
            forward_operators=tuple(self._known),
        )

    def _look_up(self, name: str, result: Any) -> None:
        """Note the first result of recomputation that forward did not have."""
        module = self._locator.module
        call = self._runs[name, module]
        self._runs[name, module] += 1
        for tensor in plain_tensors(tensors_in(result)):
            self._count += 1
            if self._first is None and _digest(tensor) not in self._known[name]:
                has_run = bool(self._known[name])
                shape = tuple(tensor.shape)
                self._first = Divergence(
                    operator=name, module=module, call=call, shape=shape, has_run=has_run
                )

    def _measure(self, scores: Tensor) -> None:
        """Note how far recomputed scores are from those of the same call, which are the nearest."""
        distances = {
            place: (scores - known).abs().max().item()
            for place, (_, known, _) in enumerate(self._choices)
            if known.shape == scores.shape and known.numel()
        }
        if distances:
            place = min(distances, key=distances.__getitem__)
            self._noise[place] = max(distances[place], self._noise.get(place, 0.0))


def _digest(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, checksum(tensor)


def _ranked(scores: Tensor, _k: int, dim: int = -1, largest: bool = True, *_: Any, **__: Any) -> Tensor:
    """Return the scores of a `topk` along the last dimension, of which it chooses the largest."""
    along = scores.detach().movedim(dim, -1) if scores.dim() else scores.detach().reshape(1)
    return along if largest else -along


def _margin(scores: Tensor, chosen: int) -> float:
    """Return the smallest distance between the last chosen score and the next; infinite where all are."""
    if chosen >= scores.size(-1) or not scores.numel():
        return float("inf")
    ordered = scores.double().sort(dim=-1, descending=True).values
    return float((ordered[..., chosen - 1] - ordered[..., chosen]).min())
