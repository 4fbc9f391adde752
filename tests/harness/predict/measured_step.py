"""The instrumented step of a trial, measured in this process or in the ranks of a pool."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from harness.experiment.experiment import Experiment
from harness.measure.step import instrument
from harness.records.measured import MeasuredMemory, MeasuredWork
from harness.trial.assemble import assemble
from harness.trial.batches import batches
from harness.trial.parallel import cpu_stands_in_for_cuda, device_mesh
from harness.trial.steps import UNMEASURED_STEPS, warm_up
from strategies import Observation


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    memory: MeasuredMemory
    work: MeasuredWork
    observation: Observation


def measured_step(experiment: Experiment, devices: DeviceMesh | None = None, rank: int = 0) -> MeasuredStep:
    device = torch.device("cpu")
    batch = batches(experiment, device, experiment.mesh.data_rank(rank))
    with cpu_stands_in_for_cuda(experiment.mesh, device):
        trainee = assemble(experiment, device, devices, batch(0).parts()[0])
        warm_up(trainee, batch)
        report = instrument(trainee, batch(UNMEASURED_STEPS))
        return MeasuredStep(memory=report.memory, work=report.work, observation=trainee.observe())


def step_of_rank(rank: int, experiment: Experiment) -> MeasuredStep:
    """Return what a rank of a pool measures."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP2 warns about outputs that are views, as it does in trials
        devices = device_mesh(experiment.mesh, torch.device("cpu"))
        return measured_step(experiment, devices, rank)
