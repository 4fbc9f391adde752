"""Predictions: the record of a trial that nobody has run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import TypeAlias

from harness.experiment.experiment import Experiment
from harness.measure.environment import environment_id, identity
from harness.predict.fake_rank import FakeStep, fake_step
from harness.predict.trace import Times, Trace
from harness.records.fields import encode
from harness.records.measured import MeasuredBaseline, MeasuredTime, Observed, RankResult
from harness.records.record import Ending, Identity, Record, build
from harness.records.store import trial_id

Seconds: TypeAlias = Callable[[Trace], Times]
"""Turns the trace of a step into its time."""

_NOTE = "predicted by the code of a trial on tensors without memory; nothing has run"


def predict(experiment: Experiment, *, device: str = "cpu", seconds: Seconds | None = None) -> Record:
    """Return the record that a trial of `experiment` would leave, without parity; nothing of it runs.

    The numbers are those of rank 0, which no other rank exceeds: shards are cut so that the first is the
    largest. The call must stand in a process without a process group.

    Args:
        experiment: the trial, on any mesh.
        device: type of the device that computes, `cpu` or `cuda`; it need not be there.
        seconds: gives the record its step time; without it there is none.

    Raises:
        ConfigError: the model's shapes depend on data; the message names operator and module.
        StrategyError: a strategy does not fit the model.
    """
    started_at = _now()
    variant, twin = fake_steps(experiment, device)
    time = None if seconds is None else _time(experiment, seconds(variant.trace), seconds(twin.trace))
    result = RankResult(
        rank=0,
        local_rank=0,
        memory=variant.memory,
        work=variant.work.beyond(twin.work),
        observation=Observed(**asdict(variant.observation)),
        baseline=MeasuredBaseline(memory=twin.memory, work=twin.work),
        trained=variant.trained,
        time=time,
    )
    ending = Ending(status="predicted", error=None, started_at=started_at, finished_at=_now())
    environment = identity(device, experiment.files) | {"world_size": experiment.mesh.world_size}
    resolved = experiment.to_dict()
    who = Identity(
        trial_id=trial_id(resolved),
        environment_id=environment_id(environment),
        name="prediction",
        experiment=resolved,
    )
    return build(who, ending, [encode(result)], environment=environment, note=_NOTE)


def fake_steps(experiment: Experiment, device: str) -> tuple[FakeStep, FakeStep]:
    """Return the steps of `experiment` and of its twin."""
    return step_of(experiment, device), step_of(experiment.twin(), device)


def step_of(experiment: Experiment, device: str) -> FakeStep:
    """Return what `fake_step` returns; the latest are remembered, because points of a sweep share twins."""
    return _step(_Asked(trial_id(experiment.to_dict()), device, experiment))


@dataclass(frozen=True, slots=True)
class _Asked:
    trial_id: str
    device: str
    experiment: Experiment = field(compare=False)


@lru_cache(maxsize=16)
def _step(asked: _Asked) -> FakeStep:
    return fake_step(asked.experiment, asked.device)


def _time(experiment: Experiment, variant: Times, twin: Times) -> MeasuredTime:
    reads_tokens = experiment.model.reads_tokens()
    return MeasuredTime(
        variant_s=(variant.step_s,),
        twin_s=(twin.step_s,),
        tokens_per_step=experiment.batch_size * experiment.sequence_length if reads_tokens else None,
        peak_flops_per_s=variant.peak_flops_per_s,
        peak_flops_per_s_source=variant.source,
    )


def _now() -> str:
    return datetime.now(UTC).isoformat()
