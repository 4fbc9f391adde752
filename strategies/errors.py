"""Errors of strategies.

ValueError
└── StrategyError      the model or the value is unsuitable; raised before compute, or in the first forward
"""

from __future__ import annotations


class StrategyError(ValueError):
    """A strategy cannot be applied as asked.

    Args:
        where: what the user can change, as a configuration path (`ac.ac_freq`).
        problem: what is wrong and what would be right, `must be at least 1, got 0`.
    """

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(where, problem)
        self.where = where
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"
