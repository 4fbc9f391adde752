"""Predictions that cost nothing: bytes that follow from the fields of an experiment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from harness.experiment.experiment import Experiment
from harness.predict.hardware import Hardware
from harness.records.measured import MemoryNumbers
from harness.records.merge_ranks import Memory
from harness.records.record import Record
from tests.harness import records_fixture

CONF = Path(__file__).parents[3] / "conf" / "hardware"


def hardware(name: str = "h100", **changes: Any) -> Hardware:
    """Return hardware as the configuration has it, with `changes`."""
    fields: dict[str, Any] = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))  # type: ignore[assignment]
    return Hardware(**fields | changes)


def predicted(experiment: Experiment, peak_bytes: int, step_s: float = 0.5) -> Record:
    """Return a prediction of `experiment` with this peak and step time."""
    made = records_fixture.record(experiment.to_dict())
    assert made.time is not None
    step_time = replace(made.time.step_time_s, median=step_s)
    return replace(
        made,
        status="predicted",
        memory=memory(peak_bytes),
        time=replace(
            made.time,
            step_time_s=step_time,
            tokens_per_s=1000 / step_s,
            job_tokens_per_s=1000 / step_s * experiment.mesh.world_size,
        ),
    )


def by_bytes(needed: Callable[[Experiment], int]) -> Callable[[Experiment], MemoryNumbers]:
    """Return a function from an experiment to bytes, whose peak is `needed` of it."""
    return lambda experiment: memory(needed(experiment))


def memory(peak_bytes: int) -> Memory:
    """Return bytes of a step with this peak."""
    made = records_fixture.record().memory
    assert made is not None
    return replace(made, peak_bytes=peak_bytes)
