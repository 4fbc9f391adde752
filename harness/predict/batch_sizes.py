"""Steps of points that differ in their batch size alone, found between those of three batch sizes.

The steps with the smallest, a middle and the largest batch are traced. Where all three do the same, and each
number of the middle one (bytes, FLOPs, lengths) lies on the line between the two others, a step between them
does the same too, with its numbers on these lines. What is assumed, because three traces cannot show it:

* The model asks of sizes only which of two is larger (`ModelSpec.scales_with_batch`), and the strategy asks
  nothing else (`Strategy.scales_with_batch`). Sizes are lines over the batch, so each such question has one
  answer up to some batch and another beyond. An answer that is the same at both ends is the same between.
* So numbers are sums, products with what is fixed, minima and maxima of lines. A minimum or a maximum of
  lines that is on a line in the middle is on it everywhere between the ends.

One sample on a rank is traced by itself: torch treats dimensions of one otherwise. So is what lies outside of
the three, and whatever they show to be unlike. There is no approximation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from harness.experiment.experiment import Experiment, name_of
from harness.predict.step_log import StepLog
from harness.predict.stretching import UnlikeError

FEWEST = 4
"""Batch sizes of which the step of one at least is not traced."""


def follow_from_others(experiment: Experiment) -> bool:
    """Return whether steps of `experiment` with some batch sizes follow from those with others."""
    return (
        experiment.model.scales_with_batch
        and experiment.ac.scales_with_batch
        and not experiment.is_compiled
        and (name_of(experiment.chunk), name_of(experiment.shard)) == ("none", "none")
    )


def traced_batch_sizes(experiment: Experiment, batch_sizes: Sequence[int]) -> tuple[int, int, int] | None:
    """Return the three that are traced; `None` where it is no less work than to trace all.

    Args:
        experiment: one of several that differ in their batch size alone.
    """
    some = sorted({size for size in batch_sizes if size > experiment.mesh.dp * experiment.microbatches})
    if len(some) < FEWEST or not follow_from_others(experiment):
        return None
    return some[0], some[len(some) // 2], some[-1]


def found_between(
    experiment: Experiment, traced: tuple[int, int, int], log_of: Callable[[Experiment], StepLog]
) -> StepLog | None:
    """Return the log of the step, found between three others; `None` where it has to be traced.

    Args:
        traced: batch sizes of the others, in order.
    """
    low, middle, high = traced
    if experiment.batch_size in traced or not low < experiment.batch_size < high:
        return None
    logs = [log_of(replace(experiment, batch_size=size)) for size in traced]
    with suppress(UnlikeError):
        found = _Lines(low, middle, high, experiment.batch_size).value(*logs)
        assert isinstance(found, StepLog)
        return found
    return None


@dataclass(frozen=True, slots=True)
class _Lines:
    """Draws lines through what is known of two batch sizes, and looks whether a third is on them."""

    low: int
    middle: int
    high: int
    at: int
    _known: dict[Any, Any] = field(default_factory=dict, repr=False)

    def value(self, low: Any, middle: Any, high: Any) -> Any:
        """Return what lies at `at`, of anything that a log has.

        Raises:
            UnlikeError: the three differ in more than numbers, or the middle one is off the line.
        """
        if not type(low) is type(middle) is type(high):
            raise UnlikeError("another batch size has things of other types")
        if type(low) is int:
            return self._number(low, middle, high)
        if isinstance(low, Mapping):
            return self._mapping(low, middle, high)
        if isinstance(low, list | tuple):
            return self._sequence(low, middle, high)
        if is_dataclass(low):
            names = [each.name for each in fields(low)]
            parts = [self.value(*(getattr(each, name) for each in (low, middle, high))) for name in names]
            return replace(low, **dict(zip(names, parts, strict=True)))  # type: ignore[type-var]
        if low == middle == high:
            return low
        raise UnlikeError("another batch size does something else")

    def _number(self, low: int, middle: int, high: int) -> int:
        if low == middle == high:
            return low
        grows, width = high - low, self.high - self.low
        found, rest = divmod(grows * (self.at - self.low), width)
        if rest or (middle - low) * width != grows * (self.middle - self.low):
            raise UnlikeError("a number does not grow along a line with the batch")
        return low + found

    def _mapping(self, low: Any, middle: Any, high: Any) -> dict[Any, Any]:
        if not list(low) == list(middle) == list(high):
            raise UnlikeError("another batch size has other parts")
        return {name: self.value(low[name], middle[name], high[name]) for name in low}

    def _sequence(self, low: Any, middle: Any, high: Any) -> Any:
        if not len(low) == len(middle) == len(high):
            raise UnlikeError("another batch size has more to do")
        made = [self._item(*items) for items in zip(low, middle, high, strict=True)]
        if hasattr(low, "_make"):
            return low._make(made)
        return made if isinstance(low, list) else tuple(made)

    def _item(self, *items: Any) -> Any:
        """Return what `value` returns, once for equal items: most of a step is done many times."""
        if type(items[0]) in (int, str, bool, list, dict):
            return self.value(*items)
        if items not in self._known:
            self._known[items] = self.value(*items)
        return self._known[items]
