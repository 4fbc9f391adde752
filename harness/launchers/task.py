"""The parts of a sweep: points, and tasks, which are points that may run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.experiment.experiment import Experiment
from harness.launchers.resource_shape import Shape, shape_of
from harness.predict.hardware import Hardware


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One point of a sweep: an experiment that may run, or the reason why it may not.

    Fields:
        trial_id: content address of `resolved`.
        resolved: the experiment as JSON values.
        experiment: `None` when it was refused.
        is_sound: whether its options make an experiment, which may be refused all the same.
        yaml: `resolved` for people.
        hardware: what the time of its step is predicted for; `None` predicts none.
    """

    trial_id: str
    resolved: dict[str, Any]
    experiment: Experiment | None
    refusal: ValueError | None
    yaml: str
    hardware: Hardware | None = None
    is_sound: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One trial to run; it pickles, so that it can run on another machine.

    Fields:
        trial_id, resolved, yaml, experiment, hardware: those fields of its point.
        environment_id: id of the environment in which it is to run, as the driver knows it.
        place: what stands for parts of that environment in its address, see `Launcher.place`.
    """

    trial_id: str
    resolved: dict[str, Any]
    yaml: str
    experiment: Experiment
    environment_id: str
    place: dict[str, Any]
    label: str
    hardware: Hardware | None = None

    @property
    def shape(self) -> Shape:
        """The resources it needs."""
        return shape_of(self.experiment.mesh)
