"""The step of one rank as it is timed: its operators, collectives and host copies, with their sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from strategies.step.step_recorder import OperatorWork


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """The step of one rank.

    Fields:
        computes_in: dtype of most matrix multiplications.
        operators: what takes time, each with the number of equal ones, in the order of the first of them.
        python_code: how often Python does what that checkpointing adds, by phase and kind.
        ranks_per_node: ranks of the trial that share a node.
    """

    computes_in: str
    operators: Mapping[OperatorWork, int]
    python_code: Mapping[tuple[str, str], int] = field(default_factory=dict)
    ranks_per_node: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """The expected time of a step.

    Fields:
        peak_flops_per_s: peak rate of one device in the model's dtype, for MFU and HFU; `None` if unknown.
    """

    step_s: float
    peak_flops_per_s: float | None = None
    source: str | None = None
