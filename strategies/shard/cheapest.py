"""`shard=cheapest`: the plan with the least modelled step time, found by an integer program."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING, Any

from strategies.base import StrategyError
from strategies.estimate.machine import A100, Machine
from strategies.shard.base import Sharding
from strategies.shard.model import choice as choices
from strategies.shard.model import graph_building, shard_plan, solver

if TYPE_CHECKING:
    from torch import nn

    from strategies.shard.model.graph import Choice, TensorAxis

_MIB = 1 << 20
_FIELDS = {"link_bytes_per_s": "bandwidth_bytes_per_s"}
"""Fields of a machine that have another name here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cheapest(Sharding):
    """Run every linear, embedding and norm by the candidates that together take the least time.

    Use when: `megatron` is in question, or a rank has a memory limit; give the rates of your hardware.

    Saved: as many bytes as the limit asks for.
    Recomputed: nothing.
    Moved: the collectives that the record's plan lists.

    The model of time: one rank in one step takes the FLOPs of linears and attention over a rate, and for each
    collective a latency and its bytes over a bandwidth, one after another. FSDP's two all-gathers and one
    reduce-scatter of each placed parameter are counted. Without a limit, the plan is never slower than
    `megatron` by this model and never communicates more bytes.

    Fields:
        memory_limit_mib: MiB of parameters, gradients and outputs of all calls on one rank, > 0; null for any
            amount. Under FSDP a rank's shard of the parameters counts, not what is gathered for a while.
            Optimizer state, and what AC saves, are not counted.
        flops_per_s: FLOPs a second of one rank, > 0.
        bandwidth_bytes_per_s: bytes a second that a rank sends and receives at once, > 0.
        latency_s: seconds of one collective however small, >= 0.
    """

    memory_limit_mib: float | None = None
    flops_per_s: float = A100.flops_per_s
    bandwidth_bytes_per_s: float = A100.link_bytes_per_s
    latency_s: float = A100.latency_s

    def __post_init__(self) -> None:
        limit = self.memory_limit_mib
        if limit is not None and not (limit > 0 and isfinite(limit)):
            raise StrategyError("shard.memory_limit_mib", f"must be above 0 and finite, got {limit}")
        self._machine()

    def plan(self, model: nn.Module, sample: tuple[Any, ...], axis: TensorAxis) -> shard_plan.ShardPlan:
        """Return the plan; as `Sharding.plan`."""
        graph = graph_building.model_graph(model, sample, axis, self._machine())
        reference = choices.megatron(graph)
        graph = choices.with_random_numbers_of(graph, reference)
        limits = solver.Limits(communicated_bytes=sum(option.communicated_bytes for option in reference))
        if self.memory_limit_mib is not None:
            limits = solver.Limits(memory_bytes=int(min(self.memory_limit_mib * _MIB, sys.maxsize)))
        try:
            choice = solver.cheapest(graph, limits)
        except StrategyError as error:
            if self.memory_limit_mib is not None:
                problem = f"no plan that the model's code allows fits {self.memory_limit_mib} MiB a rank"
                raise StrategyError("shard.memory_limit_mib", f"{problem}: {error.problem}") from error
            choice = reference
        if self.memory_limit_mib is None and (choice is None or _seconds(choice) > _seconds(reference)):
            choice = (
                reference  # states that its code did not allow are taken out for good, one too many perhaps
            )
        if choice is None:
            smallest = solver.smallest_memory_bytes(graph)
            assert smallest is not None, "Megatron's choice fits together"
            raise StrategyError(
                "shard.memory_limit_mib",
                f"no plan fits {self.memory_limit_mib} MiB a rank; the smallest takes {smallest / _MIB:.3f}",
            )
        return shard_plan.ShardPlan.of(graph, choice, axis.ranks)

    def _machine(self) -> Machine:
        """Return the machine of the options; a refusal names the option."""
        try:
            return replace(
                A100,
                flops_per_s=self.flops_per_s,
                link_bytes_per_s=self.bandwidth_bytes_per_s,
                latency_s=self.latency_s,
            )
        except StrategyError as error:
            name = error.where.removeprefix("machine.")
            raise StrategyError(f"shard.{_FIELDS.get(name, name)}", error.problem) from error


def _seconds(choice: Choice) -> float:
    return sum(option.seconds for option in choice)
