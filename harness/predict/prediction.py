"""Predictions: the record of a trial that nobody has run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

import torch

from harness.errors import ConfigError
from harness.experiment.experiment import Experiment
from harness.measure.environment import environment_id, identity
from harness.predict.batch_sizes import follow_from_others, found_between, traced_batch_sizes
from harness.predict.fake_rank import DEVICE, step_log
from harness.predict.hardware import Hardware
from harness.predict.repeated_blocks import composed, is_deep
from harness.predict.step_log import FakeStep, StepLog, fake_step
from harness.predict.step_time import timed_on
from harness.predict.trace import Times, Trace
from harness.records.fields import encode
from harness.records.measured import (
    MeasuredBaseline,
    MeasuredTime,
    Observed,
    RankResult,
    StepBytes,
    StepFlops,
)
from harness.records.merge_ranks import highest_by_phase
from harness.records.predicted_step import PredictedStep, assuming
from harness.records.record import Ending, Identity, Record, build
from harness.records.statistics import Ratio
from harness.records.store import trial_id
from harness.trial.kept_plans import plans_kept_in
from strategies import StrategyError
from strategies.last_words import last_words

Seconds: TypeAlias = Callable[[Trace], Times]
"""Turns the trace of a step into its time."""

_MOST_SHARED, _MOST_LOGS = 64, 16
_NOTE = "predicted by the code of a trial on tensors without memory; nothing has run"


def predict(
    experiment: Experiment,
    *,
    device: str = DEVICE,
    seconds: Seconds | None = None,
    batch_sizes: Sequence[int] = (),
) -> Record:
    """Return the record that a trial of `experiment` would leave, without parity; nothing of it runs.

    The numbers are those of rank 0, which no other rank exceeds: shards are cut so that the first is the
    largest. In a ring they are those of the last part, which meets the keys of all. Of a pipeline each rank
    of `pp` is predicted, without a time: ranks wait for one another. Where ranks of unlike steps have plans
    of their own, the first rank of each kind is predicted.
    The call must stand in a process without a process group.

    Args:
        device: type of the device that computes; there is one so far.
        seconds: gives the record its step time; without it there is none.
        batch_sizes: those of all points that are to be predicted and differ in them alone. Where there are
            many, three are traced.

    Raises:
        ConfigError: no such device; something of the model depends on data, and the message names operator,
            module and line.
        StrategyError: a strategy does not fit the model.
    """
    if device != DEVICE:
        problem = f"must be one of {DEVICE}, got {device!r}"
        remedy = "torch ends a process whose tensors say that they are on a GPU which is not there"
        raise ConfigError("device", f"{problem}: {remedy}")
    started_at = _now()
    mesh, results, ranks = experiment.mesh, [], predicted_ranks(experiment)
    steps = (steps_of(each, batch_sizes, ranks) for each in (experiment, experiment.twin()))
    for rank, variant, twin in zip(ranks, *steps, strict=True):
        time = None
        if seconds is not None and mesh.pp == 1:
            time = _time(experiment, seconds(variant.trace), seconds(twin.trace))
        result = RankResult(
            rank=rank,
            local_rank=0,
            memory=variant.memory,
            work=variant.work.beyond(twin.work),
            pipeline=variant.pipeline,
            observation=Observed(**asdict(variant.observation)),
            baseline=MeasuredBaseline(memory=twin.memory, work=twin.work),
            trained=variant.trained,
            time=time,
        )
        results.append(encode(result))
    ending = Ending(status="predicted", error=None, started_at=started_at, finished_at=_now())
    environment = identity(DEVICE, experiment.model.files()) | {"world_size": experiment.mesh.world_size}
    resolved = experiment.to_dict()
    who = Identity(
        trial_id=trial_id(resolved),
        environment_id=environment_id(environment),
        name="prediction",
        experiment=resolved,
    )
    assumes = tuple(dict.fromkeys((*variant.assumes, *twin.assumes)))
    note = f"{_NOTE}; {assuming(assumes)}" if assumes else _NOTE
    record = build(who, ending, results, environment=environment, note=note)
    return replace(_exact(record), assumes=assumes)


def predicted_step(
    experiment: Experiment, hardware: Hardware | None = None, folder: Path | None = None
) -> PredictedStep | None:
    """Return what the instrumented step will show on the CPU; `None` where the model cannot be faked.

    Args:
        experiment: a trial that is about to run.
        hardware: what its time is predicted for; without it, or a rate for the step's dtype, there is none.
        folder: keeps plans for the trial; `None`: nothing does.
    """
    if experiment.ac.runs_user_code():
        folder = None  # the key of a plan does not say what that reads
    try:
        with plans_kept_in(folder, experiment, torch.device(DEVICE)):
            steps = steps_of(experiment)
        memories, works = [each.memory for each in steps], [each.work for each in steps]
        predicted = PredictedStep(
            **{each.name: max(getattr(one, each.name) for one in memories) for each in fields(StepBytes)},
            **{each.name: max(getattr(one, each.name) for one in works) for each in fields(StepFlops)},
            offloaded_bytes=max(each.observation.offloaded_bytes for each in steps),
            collectives=highest_by_phase([each.collectives for each in works]),
            collective_bytes=highest_by_phase([each.collective_bytes for each in works]),
            assumes=tuple(dict.fromkeys(each for step in steps for each in step.assumes)),
        )
        # ranks of a pipeline wait for one another; of others the busiest one keeps the rest waiting
        traces = [each.trace for each in steps if experiment.mesh.pp == 1]
        return _with_time(predicted, traces, hardware)
    except (ConfigError, StrategyError):
        return None
    except Exception as error:  # noqa: BLE001 (a trial says what is wrong with its model)
        words = last_words(error)
        sys.stderr.write(f"not predicted: {words.kind}: {words.message}\n")
        return None


def _with_time(step: PredictedStep, traces: Sequence[Trace], hardware: Hardware | None) -> PredictedStep:
    """Return a prediction with the step time of the slowest rank, where the hardware has a rate for it."""
    if hardware is None or not traces:
        return step
    try:
        step_time_s = max(timed_on(hardware)(trace).step_s for trace in traces)
    except ConfigError:  # no rate for a dtype that the step multiplies in
        return step
    return replace(step, hardware=hardware.name, step_time_s=step_time_s)


def predicted_ranks(experiment: Experiment) -> tuple[int, ...]:
    """Return the ranks whose steps decide what a record says, in order.

    Of a pipeline one of each stage; of a ring the last part's, whose step takes most. Where AC plans, ranks
    with unlike steps have plans of their own, and any of them may have the highest peak.
    """
    mesh = experiment.mesh
    if experiment.ac.step_planner is not None:
        return mesh.first_ranks(is_balanced=True)
    of_a_stage = mesh.world_size // (mesh.dp_replicate * mesh.pp)
    return tuple(stage * of_a_stage + mesh.most_loaded for stage in range(mesh.pp))


def step_of(experiment: Experiment, batch_sizes: Sequence[int] = (), rank: int | None = None) -> FakeStep:
    """Return what the step of `experiment` shows on one rank; the latest are remembered.

    Args:
        experiment: the variant or its twin.
        batch_sizes: as of `predict`.
        rank: number of the rank; `None`: the one that decides what a record says.

    Raises:
        ConfigError: several ranks decide it, and nobody says which.
        ConfigError, StrategyError, RuntimeError: as of `fake_rank.step_log`.
    """
    if rank is not None:
        return fake_step(_shared_log(_Traced(experiment), rank))
    mesh = experiment.mesh
    if len(predicted_ranks(experiment)) > 1:
        problem = f"the ranks of {mesh.label} hold different bytes, and this needs those of one"
        where, remedy = ("pp", "1") if mesh.pp > 1 else ("cp_method", "gather or ulysses")
        raise ConfigError(f"mesh.{where}", f"{problem}; acbench-plan predicts them all, or use {remedy}")
    return _shared_step(_Traced(experiment), traced_batch_sizes(experiment, batch_sizes))


def steps_of(
    experiment: Experiment, batch_sizes: Sequence[int] = (), ranks: Sequence[int] = ()
) -> list[FakeStep]:
    """Return the steps that decide what a record says, of several ranks where they are unlike.

    Args:
        experiment: the variant or its twin.
        batch_sizes: as of `predict`.
        ranks: their numbers; none: those of `predicted_ranks`.

    Raises:
        ConfigError, StrategyError, RuntimeError: as of `fake_rank.step_log`.
    """
    asked = ranks or predicted_ranks(experiment)
    if len(asked) == 1:
        return [step_of(experiment, batch_sizes)]
    found: list[FakeStep] = []
    refused: list[StrategyError] = []
    for rank in asked:
        try:
            found.append(step_of(experiment, rank=rank))
        except StrategyError as error:
            refused.append(error)
    if refused:  # of budgets that ranks cannot keep, by that of the rank which needs the most
        raise max(refused, key=lambda error: getattr(error.__cause__, "minimum_feasible_bytes", 0))
    return found


def shared_key(experiment: Experiment) -> str:
    """Return what points have in common whose steps are one, or follow from one another."""
    return _key(experiment, batch_size=None) if follow_from_others(experiment) else _key(experiment)


@dataclass(frozen=True, slots=True)
class _Traced:
    """An experiment that is equal to each other one with the same step."""

    experiment: Experiment = field(compare=False)
    key: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", _key(self.experiment))


def _key(experiment: Experiment, **other: None) -> str:
    resolved = experiment.to_dict() | {"protocol": None} | other
    files = [(str(path), path.stat().st_mtime_ns) for path in experiment.model.files()]
    return json.dumps([resolved, files], sort_keys=True)


@lru_cache(maxsize=_MOST_SHARED)
def _shared_step(traced: _Traced, batch_sizes: tuple[int, int, int] | None) -> FakeStep:
    """Return the step of an experiment; where `batch_sizes` are given, it may be found between theirs."""

    def trace(experiment: Experiment) -> StepLog:
        return _shared_log(_Traced(experiment))

    def log_of(experiment: Experiment) -> StepLog:
        found = None if batch_sizes is None else found_between(experiment, batch_sizes, trace)
        return trace(experiment) if found is None else found

    log = composed(traced.experiment, log_of) if is_deep(traced.experiment) else None
    return fake_step(log_of(traced.experiment) if log is None else log)


@lru_cache(maxsize=_MOST_LOGS)
def _shared_log(traced: _Traced, rank: int | None = None) -> StepLog:
    return step_log(traced.experiment, rank, most=most_of_ranks(traced.experiment))


def most_of_ranks(experiment: Experiment) -> Callable[..., tuple[int, ...]] | None:
    """Return what stands for ranks with unlike steps, where a rank's plan asks for the highest peak.

    A budget may be a share of the plain model's peak, which is that of the highest rank.

    Args:
        experiment: the variant or its twin.

    Raises:
        ConfigError, StrategyError, RuntimeError: as of `fake_rank.step_log`.
    """
    ranks = predicted_ranks(experiment)
    if len(ranks) == 1 or experiment.ac.step_planner is None:
        return None
    highest = max(each.memory.peak_bytes for each in steps_of(experiment.plain(), ranks=ranks))
    return lambda plain_bytes, least_bytes: (max(plain_bytes, highest), least_bytes)


def _time(experiment: Experiment, variant: Times, twin: Times) -> MeasuredTime:
    return MeasuredTime(
        variant_s=(variant.step_s,),
        twin_s=(twin.step_s,),
        tokens_per_step=experiment.tokens_per_step,
        devices=experiment.mesh.world_size,
        peak_flops_per_s=variant.peak_flops_per_s,
        peak_flops_per_s_source=variant.source,
    )


def _exact(record: Record) -> Record:
    """Return a prediction with the ratio of its step times as it is: there is nothing to resample."""
    time = record.time
    if time is None or time.ratio_to_baseline is None:
        return record
    median = time.ratio_to_baseline.median
    return replace(
        record, time=replace(time, ratio_to_baseline=Ratio(median=median, low=median, high=median))
    )


def _now() -> str:
    return datetime.now(UTC).isoformat()
