"""`ac=selective_layer`: recompute some of the blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from strategies.ac.base import Recomputing
from strategies.base import StrategyError

if TYPE_CHECKING:
    from torch import nn

    from strategies.regions.region import RegionCallSite


_USUAL = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectiveLayer(Recomputing):
    """Checkpoint one block in every `ac_freq`, the first or the last ones, or those that are named.

    Use when: `full` frees more memory than needed; each block without a region is not recomputed. Of as many
        blocks the first cost the least peak: what runs again of the last is there at the peak.

    Saved: the inputs of checkpointed blocks, and all activations of the others.
    Recomputed: the forward of floor(L / ac_freq) of the L blocks, or of those that are chosen, once a step.
    Moved: nothing.

    Fields:
        ac_freq: distance k between checkpointed blocks, >= 1: blocks k-1, 2k-1, ... from 0; 1 is full AC,
            more than L is none. At most one of the others is given in its place.
        first: number of checkpointed blocks from the first on, >= 1.
        last: number of checkpointed blocks up to the last, >= 1.
        layers: numbers of the checkpointed blocks, from 0.

    Source: Chen et al. 2016, arXiv:1604.06174, section 4.1.
    """

    scales_with_batch: ClassVar[bool] = True

    ac_freq: int = _USUAL
    first: int | None = None
    last: int | None = None
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse numbers that choose nothing, and two ways to choose."""
        Recomputing.__post_init__(self)  # a slotted dataclass has no zero-argument super()
        for name in ("ac_freq", "first", "last"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise StrategyError(f"ac.{name}", f"must be at least 1, got {value}")
        object.__setattr__(self, "layers", _numbers(self.layers))
        given = [
            f"ac.{name}" for name in ("first", "last", "layers") if getattr(self, name) not in (None, ())
        ]
        if given and self.ac_freq != _USUAL:
            given.insert(0, "ac.ac_freq")
        if len(given) > 1:
            raise StrategyError("ac", f"give one of {' and '.join(given)}: each chooses the blocks by itself")

    def call_site(self, model: nn.Module) -> RegionCallSite:  # noqa: ARG002 (refused whatever the model)
        """Refuse: one region around the whole model leaves no blocks to choose from.

        Raises:
            StrategyError: always.
        """
        problem = "call_site makes the model one region, and selective_layer chooses among blocks"
        raise StrategyError("wrap_order", f"{problem}; use ac=full")

    def _chosen(self, fqns: Sequence[str]) -> Sequence[str]:
        """Return the chosen blocks. Raises StrategyError: there are not so many."""
        count = len(fqns)
        for name in ("first", "last"):
            if (getattr(self, name) or 0) > count:
                problem = f"is {getattr(self, name)}, and the model has {count} blocks"
                raise StrategyError(f"ac.{name}", f"{problem}; use at most {count}, or ac=full")
        if self.layers and self.layers[-1] >= count:
            problem = f"names block {self.layers[-1]}, and the model has blocks 0 to {count - 1}"
            raise StrategyError("ac.layers", problem)
        if self.layers:
            return [fqns[number] for number in self.layers]
        if self.first is not None:
            return fqns[: self.first]
        return fqns[self.ac_freq - 1 :: self.ac_freq] if self.last is None else fqns[-self.last :]


def _numbers(given: Any) -> tuple[int, ...]:
    """Return numbers of blocks in order.

    Raises:
        StrategyError: they are no list of numbers from 0, or one is there twice.
    """
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    if not is_list or not all(type(number) is int and number >= 0 for number in given):
        raise StrategyError("ac.layers", f"must be a list of numbers of blocks, from 0, got {given!r}")
    if len(set(given)) < len(given):
        raise StrategyError("ac.layers", f"must name each block once, got {list(given)}")
    return tuple(sorted(given))
