"""What a training step computes and communicates: FLOPs, recomputed operators, collectives."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from harness.measure.collectives import collective_name, payload_bytes
from harness.measure.memory.locator import Locator
from harness.records.measured import MeasuredWork, UncountedOperator
from strategies.estimate.flops import called, flops_of, is_causal, is_uncounted, repeated_scores
from strategies.estimate.machine import MACHINES
from strategies.estimate.tensors import tensors_in
from strategies.step.operator_mode import OperatorMode

# no work of the model: checkpointing detaches what it stashes
_BOOKKEEPING = torch.ops.aten.detach.default
PHASES = ("forward", "backward", "optimizer")


class OperatorListener(Protocol):
    """Is told of every operator that was counted."""

    def heard(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, *, flops: int
    ) -> None:
        """Take an operator, what it was given, what it gave, and its FLOPs."""


class CountedOperator(NamedTuple):
    """One operator of a step.

    Fields:
        phase: `forward`, `backward` or `optimizer`.
        name: name and overload.
        is_recomputed: a forward operator of the backward pass, and no bookkeeping.
        flops: those of the call.
        repeated_flops: those of them that a backward kernel of attention computes once more.
        is_causal: attention with a causal mask.
        collective: its name in records, `None` of what is none.
        payload_bytes: bytes of the collective.
        moved_bytes: bytes that the operator reads and writes; 0 of a view.
        is_uncounted: it computes more than its bytes tell, and has no formula of FLOPs.
    """

    phase: str
    name: str
    is_recomputed: bool
    flops: int
    repeated_flops: int
    is_causal: bool
    collective: str | None
    payload_bytes: int
    moved_bytes: int = 0
    is_uncounted: bool = False


class WorkCounter(OperatorMode):
    """Counts the operators between `__enter__` and `__exit__`; of DTensors, those on their local tensors.

    Args:
        locator: says where in the step an operator runs.
        listener: is told of each.
        device: type of the device that computes.

    Attributes:
        operators: those so far, in order of time.
    """

    def __init__(
        self, locator: Locator, listener: OperatorListener | None = None, *, device: str = "cpu"
    ) -> None:
        super().__init__()
        self._device = device
        self._locator = locator
        self._listener = listener
        self.operators: list[CountedOperator] = []
        self._known: dict[CountedOperator, CountedOperator] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `func` and count it."""
        result = func(*args, **kwargs)
        func, args = called(func, args)
        flops = flops_of(func, args, kwargs, result)
        is_work = func is not _BOOKKEEPING
        collective = collective_name(func)
        counted = CountedOperator(
            phase=self._locator.phase,
            name=str(func),
            is_recomputed=is_work and self._locator.is_recomputing,
            flops=flops,
            repeated_flops=repeated_scores(func, args, flops) if flops else 0,
            is_causal=flops > 0 and is_causal(func, args, kwargs),
            collective=collective,
            payload_bytes=0 if collective is None else payload_bytes(args, result),
            moved_bytes=0 if getattr(func, "is_view", False) else _bytes_of((args, kwargs, result)),
            is_uncounted=is_uncounted(func, args),
        )
        self.operators.append(self._known.setdefault(counted, counted))
        if self._listener is not None and is_work:
            self._listener.heard(func, args, kwargs, result, flops=flops)
        return result

    def report(self) -> MeasuredWork:
        """Return the counts so far."""
        return work_of(self.operators, self._locator.calls, device=self._device)


def work_of(
    operators: Iterable[CountedOperator], calls: Mapping[str, int], *, device: str = "cpu"
) -> MeasuredWork:
    """Return the work of a step.

    Args:
        operators: all of the step.
        calls: forward calls by block, recomputation included.
        device: type of the device that computes.
    """
    flops: Counter[str] = Counter()
    recomputed_ops: Counter[str] = Counter()
    collectives: defaultdict[str, Counter[str]] = defaultdict(Counter)
    collective_bytes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    recomputed_flops = repeated_flops = causal_flops = 0
    counted = Counter(operators)
    for each, count in counted.items():
        flops[each.phase] += count * each.flops
        repeated_flops += count * each.repeated_flops
        causal_flops += count * each.flops * each.is_causal
        if each.is_recomputed:
            recomputed_ops[each.name] += count
            recomputed_flops += count * each.flops
        if each.collective is not None:
            collectives[each.phase][each.collective] += count
            collective_bytes[each.phase][each.collective] += count * each.payload_bytes
    return MeasuredWork(
        forward_flops=flops["forward"],
        backward_flops=flops["backward"],
        recomputed_flops=recomputed_flops,
        kernel_recomputed_flops=repeated_flops,
        causal_attention_flops=causal_flops,
        recomputed_ops=dict(sorted(recomputed_ops.items())),
        uncounted_ops=_uncounted(counted, device),
        calls=dict(calls),
        collectives={phase: dict(collectives[phase]) for phase in PHASES},
        collective_bytes={phase: dict(collective_bytes[phase]) for phase in PHASES},
    )


def _uncounted(operators: Mapping[CountedOperator, int], device: str) -> dict[str, UncountedOperator]:
    """Return the operators whose FLOPs nobody counts, by name, with their share of the step's seconds.

    Seconds are those of plans: a roofline of FLOPs and bytes, on the machine that stands for the device.
    """
    if not any(each.is_uncounted for each in operators):
        return {}
    machine = MACHINES.get(device, MACHINES["cuda"])
    counts: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    step_s = 0.0
    for each, count in operators.items():
        taken_s = count * machine.operator_s(each.flops, each.moved_bytes) if each.moved_bytes else 0.0
        step_s += taken_s
        if each.is_uncounted:
            counts[each.name] += count
            seconds[each.name] += taken_s
    return {
        name: UncountedOperator(count=counts[name], seconds_share=seconds[name] / step_s if step_s else 0.0)
        for name in sorted(counts)
    }


def _bytes_of(values: tuple[Any, ...]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors_in(values))
