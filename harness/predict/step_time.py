"""The time of a predicted step on named hardware.

An operator takes a roofline: its FLOPs at the peak rate of its dtype or its bytes at the memory's bandwidth,
whichever is longer, and a launch. Matrix products with few rows are slower, and so are fused attention and,
on a CPU, functions such as gelu. A collective takes alpha-beta: a latency, and the bytes that a rank sends
over the slowest link of its group. A host copy takes its bytes over the host link. Rates are the hardware's
times its efficiency.

Checkpointing adds Python code to operators (`python_code`), which a CPU waits for. Each kind takes as many
times the seconds of a question of a selective policy as on the machine of `estimate.machine.PYTHON_S`.

Overlap: on CUDA, FSDP and DDP communicate, and offloading copies, beside computation. So each phase (forward,
backward, optimizer) takes the longest of the three, as if the first and the last could hide too. Collectives
that computation waits for, those of tensor parallelism, are added to it. On the CPU nothing overlaps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from harness.predict.hardware import Hardware
from harness.predict.trace import Times, Trace
from strategies.estimate.machine import PYTHON_S
from strategies.step.step_recorder import Collective, OperatorWork

_PHASES = ("forward", "backward", "optimizer")
_ATTENTION = "_scaled_dot_product"
_PARTS = {"complex64": "float32", "complex128": "float64"}
"""Dtype of the real numbers that complex ones are computed with."""
_SENT_TWICE = ("all_reduce",)


def timed_on(hardware: Hardware) -> Callable[[Trace], Times]:
    """Return a function from the step of one rank to its time on `hardware`.

    It raises `ConfigError` where the hardware has no rate for a dtype that the step multiplies in.
    """

    def timed(trace: Trace) -> Times:
        """Return the time of a step on the hardware."""
        source = hardware.sources.get("flops_per_s", "as given")
        return Times(
            step_s=sum(_phase_s(trace, phase, hardware) for phase in _PHASES),
            peak_flops_per_s=hardware.rate(trace.computes_in),
            source=f"{hardware.name}: {source}",
        )

    return timed


def bound_by(trace: Trace, hardware: Hardware) -> str:
    """Return what a step waits for longest: `compute`, `memory`, `network` or `host`.

    An operator whose launch takes longer than its work is the host's, and so are copies to it and questions
    that Python answers. Of a phase, what hides behind the rest counts for nothing.
    """
    waits = dict.fromkeys(("compute", "memory", "network", "host"), 0.0)
    for phase in _PHASES:
        *computed, hidden_s, copied_s = _parts_s(trace, phase, hardware)
        is_hidden = hardware.device == "cuda"
        longest_s = max(sum(computed), hidden_s, copied_s)
        waits["network"] += hidden_s if not is_hidden or hidden_s == longest_s else 0.0
        waits["host"] += copied_s if not is_hidden or copied_s == longest_s else 0.0
        if not is_hidden or sum(computed) == longest_s:
            for call, count in _computed(trace, phase):
                waits_for = _operator_waits_for(call, trace.computes_in, hardware)
                waits[waits_for] += count * _operator_s(call, trace.computes_in, hardware)
            waits["network"] += computed[1]
            waits["host"] += computed[2]
    return max(waits, key=lambda kind: waits[kind])


def _operator_waits_for(call: OperatorWork, computes_in: str, hardware: Hardware) -> str:
    machine = hardware.machine(call.dtype if call.flops else computes_in)
    moved_s = (call.read_bytes + call.written_bytes) / machine.bytes_per_s
    work_s = _operator_s(call, computes_in, hardware) - machine.launch_s
    if work_s < machine.launch_s:
        return "host"
    return "memory" if moved_s >= work_s else "compute"


def _phase_s(trace: Trace, phase: str, hardware: Hardware) -> float:
    """Return the seconds of a phase; on a GPU copies and unawaited collectives hide behind the rest."""
    operators_s, waited_s, asked_s, hidden_s, copied_s = _parts_s(trace, phase, hardware)
    parts = (operators_s + asked_s + waited_s, hidden_s, copied_s)
    return max(parts) if hardware.device == "cuda" else sum(parts)


def _parts_s(trace: Trace, phase: str, hardware: Hardware) -> tuple[float, float, float, float, float]:
    """Return the seconds of operators, collectives that they wait for, questions, others, and copies."""
    computed_s = sum(
        count * _operator_s(call, trace.computes_in, hardware) for call, count in _computed(trace, phase)
    )
    waited_s = hidden_s = 0.0
    copied_bytes: Counter[str] = Counter()
    for call, count in trace.operators.items():
        if call.phase == phase and call.collective is not None:
            taken_s = count * _collective_s(call.collective, trace, hardware)
            waited_s += taken_s if call.collective.is_waited else 0.0
            hidden_s += 0.0 if call.collective.is_waited else taken_s
        elif call.phase == phase and call.host_copy:
            copied_bytes[call.host_copy] += count * call.written_bytes
    python_s = sum(
        count * PYTHON_S[kind] for (when, kind), count in trace.python_code.items() if when == phase
    )
    python_s *= hardware.policy_s / PYTHON_S["asked"] if hardware.device == "cpu" else 0.0
    # host links carry both directions at once
    copied_s = hardware.host_s(max(copied_bytes.values(), default=0))
    return computed_s, waited_s, python_s, hidden_s, copied_s


def _computed(trace: Trace, phase: str) -> Iterator[tuple[OperatorWork, int]]:
    for call, count in trace.operators.items():
        if call.phase == phase and call.collective is None and not call.host_copy:
            yield call, count


def _operator_s(call: OperatorWork, computes_in: str, hardware: Hardware) -> float:
    machine = hardware.machine(_PARTS.get(call.dtype, call.dtype) if call.flops else computes_in)
    name = call.short_name
    flops = call.flops / (hardware.attention_share if name.startswith(_ATTENTION) else 1)
    rows, moved_bytes = min(call.outer_sizes, default=0), call.read_bytes + call.written_bytes
    return machine.operator_s(flops, moved_bytes, rows, name=name, elements=call.elements)


def _collective_s(call: Collective, trace: Trace, hardware: Hardware) -> float:
    """Return the seconds of a ring: `(n-1)/n` of the payload leaves each rank, twice to all-reduce."""
    crosses_nodes = len({rank // trace.ranks_per_node for rank in call.ranks}) > 1
    leaves_node = crosses_nodes or max(call.ranks) >= hardware.ranks_per_node
    sent = call.payload_bytes * (len(call.ranks) - 1) / len(call.ranks)
    machine = hardware.machine(trace.computes_in, leaves_node=leaves_node)
    return machine.collective_s(2 * sent if call.name in _SENT_TWICE else sent)
