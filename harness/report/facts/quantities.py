"""Quantities: the numbers of a record that reports show, each read by a typed function.

The path under which a reader finds the number in `record.json` follows from the function, so both always
name the same field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar, cast

from harness.records.merge_ranks import Memory, Time, Work
from harness.records.predicted_step import PredictedStep
from harness.records.record import Record
from harness.report.facts.number_words import NumberUnit

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One number of a record, or the quotient of two.

    Fields:
        unit: how people write the number.
        read: returns the number; raises `LookupError` where the record has none.
    """

    unit: NumberUnit
    read: Callable[[Record], float]

    def of(self, record: Record) -> float | None:
        """Return the number in base units; `None` where the record has none, or divides by zero."""
        try:
            value: object = self.read(record)
        except (LookupError, ZeroDivisionError):
            return None
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    @cached_property
    def path(self) -> str:
        """Keys of the number in the record, as in `memory/saved_bytes`; `a : b` for a quotient."""
        return str(self.read(cast("Record", _FieldPath())))


def some(value: T | None) -> T:
    """Return `value`. Raises LookupError: the record has nothing there."""
    if value is None:
        raise LookupError
    return value


def _memory(read: Callable[[Memory], int]) -> Quantity:
    return Quantity(unit=NumberUnit.BYTES, read=lambda record: read(some(record.memory)))


def _work(read: Callable[[Work], float], unit: NumberUnit) -> Quantity:
    return Quantity(unit=unit, read=lambda record: read(some(record.work)))


def _time(read: Callable[[Time], float], unit: NumberUnit) -> Quantity:
    return Quantity(unit=unit, read=lambda record: read(some(record.time)))


def _quotient(over: Quantity, under: Quantity, unit: NumberUnit) -> Quantity:
    return Quantity(unit=unit, read=lambda record: over.read(record) / under.read(record))


SAVED = _memory(lambda memory: memory.saved_bytes)
PEAK = _memory(lambda memory: memory.peak_bytes)
ACTIVATION_PEAK = _memory(lambda memory: memory.activation_peak_bytes)
PARAMETERS = _memory(lambda memory: memory.parameter_bytes)
GRADIENTS = _memory(lambda memory: memory.gradient_bytes)
OPTIMIZER = _memory(lambda memory: memory.optimizer_bytes)
HOST_PEAK = _memory(lambda memory: memory.host_peak_bytes)
PREDICTED_PEAK = _memory(lambda memory: some(memory.predicted_peak_bytes))
BASELINE_PEAK = _memory(lambda memory: some(memory.baseline).peak_bytes)
BASELINE_SAVED = _memory(lambda memory: some(memory.baseline).saved_bytes)
PEAK_SHARE = _quotient(PEAK, BASELINE_PEAK, NumberUnit.SHARE)
PEAK_SAVING = Quantity(unit=NumberUnit.SHARE, read=lambda record: 1 - PEAK_SHARE.read(record))
"""Share of the baseline's peak that a trial does without; below zero where it needs more."""

ALLOCATOR: Sequence[tuple[str, Quantity]] = (
    ("peak requested", _memory(lambda memory: some(memory.allocator).peak_requested_bytes)),
    ("peak allocated", _memory(lambda memory: some(some(memory.allocator).peak_allocated_bytes))),
    ("peak reserved", _memory(lambda memory: some(some(memory.allocator).peak_reserved_bytes))),
    ("workspace", _memory(lambda memory: some(some(memory.allocator).workspace_bytes))),
)
"""Numbers of the allocator by their names in words."""

FORWARD_FLOPS = _work(lambda work: work.forward_flops, NumberUnit.FLOPS)
BACKWARD_FLOPS = _work(lambda work: work.backward_flops, NumberUnit.FLOPS)
RECOMPUTED_FLOPS = _work(lambda work: work.recomputed_flops, NumberUnit.FLOPS)
RECOMPUTED_SECONDS = _work(lambda work: work.recomputed_seconds_share, NumberUnit.SHARE)
ABOVE_BOUND = Quantity(unit=NumberUnit.POINTS, read=lambda record: some(record.bound).points_above)
OFFLOADED = _work(lambda work: work.offloaded_bytes, NumberUnit.BYTES)
CHUNKS = _work(lambda work: work.chunks, NumberUnit.COUNT)

STEP_TIME = _time(lambda time: time.step_time_s.median, NumberUnit.SECONDS)
RATIO = _time(lambda time: some(time.ratio_to_baseline).median, NumberUnit.RATIO)
RATIO_LOW = _time(lambda time: some(time.ratio_to_baseline).low, NumberUnit.BOUND)
RATIO_HIGH = _time(lambda time: some(time.ratio_to_baseline).high, NumberUnit.BOUND)
TOKENS_PER_S = _time(lambda time: some(time.tokens_per_s), NumberUnit.RATE)
JOB_TOKENS_PER_S = _time(lambda time: some(time.job_tokens_per_s), NumberUnit.RATE)
MFU = _time(lambda time: some(time.mfu), NumberUnit.UTILISATION)
HFU = _time(lambda time: some(time.hfu), NumberUnit.UTILISATION)
ENERGY = _time(lambda time: some(time.energy_j), NumberUnit.VALUE)
STEP_TIMES: Sequence[tuple[str, Quantity]] = (
    ("median", STEP_TIME),
    ("10th percentile", _time(lambda time: time.step_time_s.p10, NumberUnit.SECONDS)),
    ("90th percentile", _time(lambda time: time.step_time_s.p90, NumberUnit.SECONDS)),
)
"""Step times by their names in words."""

NEEDED = Quantity(unit=NumberUnit.BYTES, read=lambda record: some(some(record.outlook).needed_bytes))
USABLE = Quantity(unit=NumberUnit.BYTES, read=lambda record: some(some(record.outlook).usable_bytes))


def _predicted(
    read: Callable[[PredictedStep], float | None], unit: NumberUnit = NumberUnit.BYTES
) -> Quantity:
    return Quantity(unit=unit, read=lambda record: some(read(some(record.predicted))))


PREDICTED: Mapping[str, tuple[Quantity, Quantity]] = {
    "peak": (PREDICTED_PEAK, PEAK),
    "saved": (_predicted(lambda step: step.saved_bytes), SAVED),
    "host peak": (_predicted(lambda step: step.host_peak_bytes), HOST_PEAK),
    "parameters": (_predicted(lambda step: step.parameter_bytes), PARAMETERS),
    "gradients": (_predicted(lambda step: step.gradient_bytes), GRADIENTS),
    "optimizer": (_predicted(lambda step: step.optimizer_bytes), OPTIMIZER),
    "forward FLOPs": (_predicted(lambda step: step.forward_flops, NumberUnit.FLOPS), FORWARD_FLOPS),
    "backward FLOPs": (_predicted(lambda step: step.backward_flops, NumberUnit.FLOPS), BACKWARD_FLOPS),
    "offloaded": (_predicted(lambda step: step.offloaded_bytes), OFFLOADED),
}
"""Numbers that are predicted exactly, each as predicted and as measured, by their names in words."""


def missed(record: Record) -> list[str]:
    """Return the names of those numbers of `PREDICTED` that were measured otherwise."""
    found = ((name, one.of(record), other.of(record)) for name, (one, other) in PREDICTED.items())
    return [name for name, one, other in found if None not in (one, other) and one != other]


PREDICTED_TIME = (_predicted(lambda step: step.step_time_s, NumberUnit.SECONDS), STEP_TIME)
"""The step time as predicted for named hardware, and as measured."""

ERROR_RANK = Quantity(unit=NumberUnit.COUNT, read=lambda record: some(some(record.error).rank))


def loss(step: int) -> Quantity:
    """Return the loss of a parity step."""
    return Quantity(unit=NumberUnit.VALUE, read=lambda record: some(record.parity).losses[step])


def peak_part(part: str) -> Quantity:
    """Return the bytes of a part at the moment of the peak."""
    return _memory(lambda memory: memory.peak_parts[part])


def rank_peak(rank: int) -> Quantity:
    """Return the peak of one rank."""
    return _memory(lambda memory: memory.by_rank[rank].peak_bytes)


def largest_saved(index: int) -> Quantity:
    """Return the bytes of one of the largest saved storages."""
    return _memory(lambda memory: memory.largest_saved[index].bytes)


def largest_at_peak(index: int) -> Quantity:
    """Return the bytes of one of the largest tensors at the peak."""
    return _memory(lambda memory: memory.largest_at_peak[index].bytes)


def timeline_bytes(index: int | str) -> Quantity:
    """Return the bytes of one stay of the timeline; `{moment}` is the column of a figure with the index."""
    return _memory(lambda memory: memory.timeline[cast("int", index)].bytes)


def stage_bytes(rank: int) -> Quantity:
    """Return what one forward leaves on one rank of a pipeline."""
    return _memory(lambda memory: some(memory.pipeline)[rank].bytes_a_microbatch)


def in_flight(rank: int) -> Quantity:
    """Return the most forwards of one rank whose input has no gradient yet."""
    return Quantity(
        unit=NumberUnit.COUNT,
        read=lambda record: some(some(record.memory).pipeline)[rank].in_flight,
    )


def in_flight_weights(rank: int) -> Quantity:
    """Return the most forwards of one rank whose weights have no gradient of them yet."""
    return Quantity(
        unit=NumberUnit.COUNT,
        read=lambda record: some(some(record.memory).pipeline)[rank].in_flight_weights,
    )


def action_bytes(rank: int | str, number: int | str) -> Quantity:
    """Return the bytes of an action of a rank; words in braces are the columns of a figure with both."""
    return _memory(lambda memory: some(memory.pipeline)[cast("int", rank)].actions[cast("int", number)].bytes)


def recomputed_op(name: str) -> Quantity:
    """Return how often an operator ran again in backward."""
    return _work(lambda work: work.recomputed_ops[name], NumberUnit.COUNT)


def collective_count(phase: str, name: str) -> Quantity:
    """Return how often a rank started a collective in a phase."""
    return _work(lambda work: work.collectives[phase][name], NumberUnit.COUNT)


def collective_bytes(phase: str, name: str) -> Quantity:
    """Return the payload of a collective in a phase."""
    return _work(lambda work: work.collective_bytes[phase][name], NumberUnit.BYTES)


def collectives_repeated(name: str) -> Quantity:
    """Return how often recomputation started a collective once more."""
    return _work(lambda work: work.collectives_repeated[name], NumberUnit.COUNT)


def routed_tokens(index: int) -> Quantity:
    """Return the tokens of a forward that a router of one rank decides on."""
    return _work(lambda work: work.routing[index].tokens, NumberUnit.COUNT)


def router_margin(index: int) -> Quantity:
    """Return the least margin of a router of one rank."""
    return Quantity(unit=NumberUnit.VALUE, read=lambda record: some(some(record.work).routing[index].margin))


def changed_tokens(index: int) -> Quantity:
    """Return the most tokens that one recomputation has sent to other experts than forward."""
    return _work(lambda work: work.routing[index].changed_tokens, NumberUnit.COUNT)


def chunk_option(option: str) -> Quantity:
    """Return an option of the chunking strategy."""
    return Quantity(unit=NumberUnit.VALUE, read=lambda record: record.experiment["chunk"][option])


class _FieldPath:
    """Stands for a record and notes which fields are read."""

    def __init__(self, text: str = "") -> None:
        self._text = text

    def __getattr__(self, name: str) -> _FieldPath:
        return self[name]

    def __getitem__(self, key: object) -> _FieldPath:
        return _FieldPath(f"{self._text}/{key}" if self._text else str(key))

    def __truediv__(self, other: _FieldPath) -> _FieldPath:
        return _FieldPath(f"{self} : {other}")

    def __rsub__(self, whole: float) -> _FieldPath:
        return _FieldPath(f"{whole} - {self}")

    def __str__(self) -> str:
        return self._text
