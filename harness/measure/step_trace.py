"""The instrumented step in the form that stands next to a record."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter

from harness.measure.step import StepReport
from harness.records.step_trace import StepTrace, TracedChange, TracedOperator, TracedStorage
from strategies.step.ledger import is_storage
from strategies.step.step_recorder import RecordedOperator


def traced(report: StepReport, rank: int) -> StepTrace:
    """Return the storages and operators of a step on `rank`, without private memory of kernels."""
    ledger = report.ledger
    begins = [operator.start for operator in report.operators]
    kept = [number for number, life in enumerate(ledger.lives) if is_storage(life)]
    numbers = {number: place for place, number in enumerate(kept)}
    grown: Counter[int] = Counter()
    for change in ledger.changes:
        grown[change.life] += change.delta
    start = [(numbers[number], ledger.lives[number].nbytes - grown[number]) for number in kept]
    return StepTrace(
        rank=rank,
        start=tuple((number, nbytes) for number, nbytes in start if nbytes),
        storages=tuple(_storage(report, number) for number in kept),
        changes=tuple(
            TracedChange(numbers[change.life], change.delta, bisect_right(begins, moment))
            for moment, change in enumerate(ledger.changes)
            if change.life in numbers
        ),
        operators=tuple(map(_operator, report.operators)),
    )


def _storage(report: StepReport, number: int) -> TracedStorage:
    life = report.ledger.lives[number]
    return TracedStorage(
        part=report.parts[number],
        op=life.op,
        module=life.module,
        source=life.source,
        shape="x".join(map(str, life.shape)),
        dtype=life.dtype,
        on_host=life.on_host,
    )


def _operator(operator: RecordedOperator) -> TracedOperator:
    return TracedOperator(
        name=operator.name,
        phase=operator.work.phase,
        module=operator.module,
        source=operator.source,
        node=operator.node,
        is_recomputed=operator.work.is_recomputed,
        flops=operator.flops,
    )
