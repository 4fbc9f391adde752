"""What a training step computes and communicates: FLOPs, recomputed operators, collectives."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any, Protocol

import torch

from harness.measure.collectives import collective_name, payload_bytes
from harness.measure.memory.locator import Locator
from harness.records.measured import MeasuredWork
from strategies.estimate.flops import called, flops_of, is_causal, repeated_scores
from strategies.estimate.operator_mode import OperatorMode

# no work of the model: checkpointing detaches what it stashes, and fake tensors are asked for their device
_BOOKKEEPING = frozenset({torch.ops.aten.detach.default, torch.ops.prim.device.default})
PHASES = ("forward", "backward", "optimizer")


class OperatorListener(Protocol):
    """Is told of every operator that was counted."""

    def heard(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, *, flops: int
    ) -> None:
        """Take an operator, what it was given, what it gave, and its FLOPs."""


class WorkCounter(OperatorMode):
    """Counts the operators between `__enter__` and `__exit__`; of DTensors, those on their local tensors.

    Args:
        locator: says where in the step an operator runs.
        listener: is told of each.
    """

    def __init__(self, locator: Locator, listener: OperatorListener | None = None) -> None:
        super().__init__()
        self._locator = locator
        self._listener = listener
        self._flops: Counter[str] = Counter()
        self._recomputed_flops = 0
        self._repeated_in_kernels = 0
        self._causal_flops = 0
        self._recomputed_ops: Counter[str] = Counter()
        self._collectives: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._collective_bytes: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `func` and count it."""
        result = func(*args, **kwargs)
        func, args = called(func, args)
        flops = flops_of(func, args, kwargs, result)
        self._count(func, flops)
        if flops:
            self._repeated_in_kernels += repeated_scores(func, args, flops)
            self._causal_flops += flops if is_causal(func, args, kwargs) else 0
        self._count_collective(func, args, result)
        if self._listener is not None and func not in _BOOKKEEPING:
            self._listener.heard(func, args, kwargs, result, flops=flops)
        return result

    def report(self) -> MeasuredWork:
        """Return the counts so far."""
        return MeasuredWork(
            forward_flops=self._flops["forward"],
            backward_flops=self._flops["backward"],
            recomputed_flops=self._recomputed_flops,
            kernel_recomputed_flops=self._repeated_in_kernels,
            causal_attention_flops=self._causal_flops,
            recomputed_ops=dict(sorted(self._recomputed_ops.items())),
            calls=dict(self._locator.calls),
            collectives={phase: dict(self._collectives[phase]) for phase in PHASES},
            collective_bytes={phase: dict(self._collective_bytes[phase]) for phase in PHASES},
        )

    def _count(self, func: Any, flops: int) -> None:
        self._flops[self._locator.phase] += flops
        if self._locator.is_recomputing and func not in _BOOKKEEPING:
            self._recomputed_ops[str(func)] += 1
            self._recomputed_flops += flops

    def _count_collective(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        name = collective_name(func)
        if name is not None:
            self._collectives[self._locator.phase][name] += 1
            self._collective_bytes[self._locator.phase][name] += payload_bytes(args, result)
