"""The cost that a plan makes least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from strategies.budget.planning.simulation import Work

Objective: TypeAlias = Literal["flops", "time", "both"]

_TIE = 1e-6
"""Share of a step's FLOPs that a second counts, so that of equal FLOPs the fastest is chosen."""

_SHORTEST_S = 1e-9
"""Least seconds of a step, for steps without operators."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The price of work; equal ones price alike.

    Fields:
        of_flop, of_second: what each costs.
    """

    of_flop: float
    of_second: float

    @classmethod
    def of(cls, objective: Objective, step_flops: int, step_s: float) -> Cost:
        """Return what an objective makes least.

        Args:
            objective: `flops`, of which equal ones differ by seconds; `time`; or `both`, where a percent of
                the step's time counts as much as a percent of its FLOPs.
            step_flops, step_s: work of the step, without recomputation.
        """
        if objective == "time":
            return cls(0.0, 1.0)
        if objective == "flops":
            return cls(1.0, _TIE * step_flops)
        return cls(1.0, max(step_flops, 1) / max(step_s, _SHORTEST_S))

    def __call__(self, work: Work) -> float:
        """Return the cost of work on top of a step."""
        return self.of_flop * work.flops + self.of_second * work.seconds
