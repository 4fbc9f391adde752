"""The work of a recorded training step: FLOPs, recomputed operators, collectives."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from harness.records.measured import MeasuredWork, UncountedOperator
from strategies.estimate.machine import MACHINES
from strategies.step.step_recorder import OperatorWork

PHASES = ("forward", "backward", "optimizer")


def work_of(
    operators: Iterable[OperatorWork], calls: Mapping[str, int], *, device: str = "cpu"
) -> MeasuredWork:
    """Return the work of a step.

    Args:
        calls: forward calls by block, recomputation included.
        device: type of the device that computes.
    """
    flops: Counter[str] = Counter()
    recomputed_ops: Counter[str] = Counter()
    collectives: defaultdict[str, Counter[str]] = defaultdict(Counter)
    collective_bytes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    collectives_repeated: Counter[str] = Counter()
    recomputed_flops = repeated_flops = causal_flops = 0
    counted = Counter(operators)
    machine = MACHINES.get(device, MACHINES["cuda"])
    seconds = {
        each: count * each.seconds(machine) if each.moved_bytes else 0.0 for each, count in counted.items()
    }
    for each, count in counted.items():
        flops[each.phase] += count * each.flops
        repeated_flops += count * each.repeated_flops
        causal_flops += count * each.flops * each.is_causal
        if each.is_recomputed:
            recomputed_ops[each.name] += count
            recomputed_flops += count * each.flops
        if each.collective is not None:
            name, payload_bytes, *_ = each.collective
            collectives[each.phase][name] += count
            collective_bytes[each.phase][name] += count * payload_bytes
            collectives_repeated[name] += count * each.is_recomputed
    again_s = sum(taken_s for each, taken_s in seconds.items() if each.is_recomputed)
    others_s = sum(seconds.values()) - again_s
    return MeasuredWork(
        forward_flops=flops["forward"],
        backward_flops=flops["backward"],
        recomputed_flops=recomputed_flops,
        kernel_recomputed_flops=repeated_flops,
        causal_attention_flops=causal_flops,
        recomputed_ops=dict(sorted(recomputed_ops.items())),
        recomputed_seconds_share=again_s / others_s if others_s else 0.0,
        uncounted_ops=_uncounted(counted, seconds),
        calls=dict(calls),
        collectives={phase: dict(collectives[phase]) for phase in PHASES},
        collective_bytes={phase: dict(collective_bytes[phase]) for phase in PHASES},
        collectives_repeated=dict(sorted((+collectives_repeated).items())),
    )


def _uncounted(
    operators: Mapping[OperatorWork, int], seconds: Mapping[OperatorWork, float]
) -> dict[str, UncountedOperator]:
    """Return the operators whose FLOPs nobody counts, by name, with their share of the step's seconds."""
    counts: Counter[str] = Counter()
    taken_s: defaultdict[str, float] = defaultdict(float)
    step_s = sum(seconds.values())
    for each, count in operators.items():
        if each.is_uncounted:
            counts[each.name] += count
            taken_s[each.name] += seconds[each]
    return {
        name: UncountedOperator(count=counts[name], seconds_share=taken_s[name] / step_s if step_s else 0.0)
        for name in sorted(counts)
    }
