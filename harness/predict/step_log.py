"""What the instrumented step of one experiment does on rank 0, and what it would show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.measure.memory.storage_history import StorageHistory
from harness.measure.work.compiled_graphs import CompiledWork
from harness.measure.work.counter import CountedOperator, work_of
from harness.predict.trace import Trace
from harness.predict.tracer import TracedCall, trace_of
from harness.records.measured import MeasuredMemory, MeasuredWork, TrainedModel
from strategies import Observation


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLog:
    """All that the instrumented step of one experiment does on rank 0, in order of time.

    Fields:
        history: storages.
        operators: operators as they are counted.
        block_calls: forward calls by block, recomputation included.
        calls: what takes time.
        observation, trained: as a trial measures them.
        compiled: what compiled functions did beside operators; `None` where nothing is compiled.
        assumes: what is assumed of the data, each in words that complete `assuming that`.
    """

    history: StorageHistory
    operators: Sequence[CountedOperator]
    block_calls: Mapping[str, int]
    calls: Sequence[TracedCall]
    observation: Observation
    trained: TrainedModel
    compiled: CompiledWork | None = None
    assumes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeStep:
    """What the instrumented step of one experiment would show on rank 0.

    Fields:
        memory, work, observation, trained: as a trial measures them.
        trace: what the step does.
        assumes: as of `StepLog`; numbers are exact where data is as assumed, and estimates elsewhere.
    """

    memory: MeasuredMemory
    work: MeasuredWork
    observation: Observation
    trained: TrainedModel
    trace: Trace
    assumes: tuple[str, ...] = ()


def fake_step(log: StepLog, device: str) -> FakeStep:
    """Return what a step shows that does what `log` says, on a type of device."""
    work = work_of(log.operators, log.block_calls, device=device)
    return FakeStep(
        memory=log.history.memory(),
        work=work if log.compiled is None else log.compiled.beside(work),
        observation=log.observation,
        trained=log.trained,
        trace=trace_of(log.calls, device=device, computes_in=log.trained.computes_in),
        assumes=log.assumes,
    )
