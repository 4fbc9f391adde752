"""`ac=compiler_budget`: the compiler decides what backward recomputes, under a share of activation bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from strategies.base import Observation, Strategy, StrategyError, check_simple_fields

if TYPE_CHECKING:
    from torch import nn

_SOLVERS = ("dp", "greedy", "ilp", "dp_knapsack_sliding_hirschberg")
_ESTIMATORS = ("flops", "profile")


@dataclass(frozen=True, kw_only=True, slots=True)
class CompilerBudget(Strategy):
    """Let torch's partitioner choose what each compiled graph keeps.

    Use when: the model is compiled anyway; needs `compile=aot_eager` or `inductor`.

    Saved: of each compiled graph, the most valuable activations within `budget` of its activation bytes.
    Recomputed: the operators that lead to the others.
    Moved: nothing.

    The budget is of bytes that forward leaves, not of the peak: a whole model that is one graph recomputes
    all at once (pytorch#197838). Dropout in such a graph was seen to give wrong gradients (pytorch#190758).

    Fields:
        budget: share of the activation bytes of a graph, in [0, 1]; 1 recomputes what costs nothing.
        solver: `dp`, `greedy`, `ilp` or `dp_knapsack_sliding_hirschberg`; the last one may exceed the budget
            (pytorch#197871).
        estimator: cost of an operator by its `flops`, or by a `profile` of it.

    Source: torch/_functorch/config.py, `activation_memory_budget`.
    """

    budget: float = 0.5
    solver: str = "dp"
    estimator: str = "flops"

    def __post_init__(self) -> None:
        """Refuse a budget that is no share, and names that the compiler does not know."""
        check_simple_fields("ac", self)
        is_number = isinstance(self.budget, int | float) and not isinstance(self.budget, bool)
        if not is_number or not 0 <= self.budget <= 1:
            raise StrategyError("ac.budget", f"must be in [0, 1], got {self.budget!r}")
        for name, options in (("solver", _SOLVERS), ("estimator", _ESTIMATORS)):
            if getattr(self, name) not in options:
                value = getattr(self, name)
                raise StrategyError(f"ac.{name}", f"must be one of {', '.join(options)}, got {value!r}")

    @property
    def partitioner(self) -> Mapping[str, Any]:
        """Settings of `torch._functorch.config` while the model is compiled, and only then."""
        return MappingProxyType(
            {
                "activation_memory_budget": float(self.budget),
                "activation_memory_budget_solver": self.solver,
                "activation_memory_budget_runtime_estimator": self.estimator,
            }
        )

    def apply(self, model: nn.Module, sample: tuple[Any, ...] = ()) -> nn.Module:  # noqa: ARG002 (nothing to look at)
        """Return `model` untouched: all that is done is done by who compiles it, under `partitioner`."""
        return model

    def observe(self, model: nn.Module) -> Observation:  # noqa: ARG002 (the plan is that of every model)
        """Return the budget as the plan."""
        return Observation(plan={"compiler_budget": dict(self.partitioner)})
