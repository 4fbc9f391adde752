"""The instrumented step of one experiment on rank 0, and what it would show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from harness.measure.memory.storage_history import StorageHistory
from harness.measure.work.compiled_graphs import CompiledWork
from harness.measure.work.counter import work_of
from harness.predict.trace import Trace
from harness.records.measured import MeasuredMemory, MeasuredWork, StagesInFlight, TrainedModel
from strategies import Observation
from strategies.step.step_recorder import OperatorWork


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLog:
    """All that the instrumented step of one experiment does on rank 0, in order of time.

    Fields:
        python_code: how often Python does what that checkpointing adds, by phase and kind.
        block_calls: forward calls by block, recomputation included.
        recomputations: forward calls of blocks by what asked for them.
        ranks_per_node: ranks of the trial that share a node.
        observation, trained: as a trial measures them.
        compiled: what compiled functions did besides operators; `None` where nothing is compiled.
        pipeline: the stages of the rank; `None` where the model is whole.
        assumes: what is assumed of the data, each in words that complete `assuming that`.
    """

    history: StorageHistory
    operators: Sequence[OperatorWork]
    python_code: Mapping[tuple[str, str], int]
    block_calls: Mapping[str, int]
    recomputations: Mapping[str, int]
    ranks_per_node: int
    observation: Observation
    trained: TrainedModel
    compiled: CompiledWork | None = None
    pipeline: StagesInFlight | None = None
    assumes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeStep:
    """The measurements that the instrumented step of one experiment would give on rank 0.

    Fields:
        assumes: as of `StepLog`; numbers are exact where data is as assumed, and estimates elsewhere.
    """

    memory: MeasuredMemory
    work: MeasuredWork
    observation: Observation
    trained: TrainedModel
    trace: Trace
    pipeline: StagesInFlight | None = None
    assumes: tuple[str, ...] = ()


def fake_step(log: StepLog) -> FakeStep:
    """Return what a step shows that does what `log` says."""
    work = work_of(log.operators, log.block_calls)
    work = replace(work, recomputations=dict(log.recomputations))
    return FakeStep(
        memory=log.history.memory(),
        work=work if log.compiled is None else log.compiled.beside(work),
        observation=log.observation,
        trained=log.trained,
        trace=Trace(
            computes_in=log.trained.computes_in,
            operators=Counter(
                operator for operator in log.operators if operator.dtype or operator.collective
            ),
            python_code=log.python_code,
            ranks_per_node=log.ranks_per_node,
        ),
        pipeline=log.pipeline,
        assumes=log.assumes,
    )
