"""What the ranks of these tests run."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from harness.experiment.data import source_of
from harness.experiment.experiment import Experiment
from harness.measure.parity.compare import compare_steps
from harness.measure.parity.snapshot import Snapshot, steps
from harness.models.base import Batch
from harness.ranks.entry import RankContext
from harness.trial.assemble import Assembled, assemble
from harness.trial.parallel import shard_fsdp1, shard_fsdp2
from tests.parity.torch_kernel import errors_of_ring

_SHARD = {"fsdp1": shard_fsdp1, "fsdp2": shard_fsdp2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharded:
    """An experiment of one rank whose model FSDP wraps all the same, over a group of one."""

    experiment: Experiment
    fsdp: str


def prove_sharded(case: Sharded, context: RankContext) -> dict[str, Any]:
    """Train the variant and its twin, both under FSDP, and return the comparison."""
    experiment, device = case.experiment, context.device
    names = ("dp_replicate", "dp_shard", "tp")
    devices = init_device_mesh(device.type, (1, 1, 1), mesh_dim_names=names)
    source = source_of(experiment.model, experiment.data, sequence_length=experiment.sequence_length)
    batches = [
        source.batch(step=step, batch_size=experiment.batch_size, seed=experiment.seed).to(device)
        for step in range(experiment.protocol.parity_steps)
    ]
    expected, actual = (
        _steps(replace(case, experiment=each), devices, batches) for each in (experiment.twin(), experiment)
    )
    with closing(expected), closing(actual):
        return compare_steps(expected, actual, count=len(batches)).as_json()


def _steps(case: Sharded, devices: DeviceMesh, batches: list[Batch]) -> Generator[Snapshot]:
    yield from steps(_trainee(case, devices, batches[0]), batches, seed=case.experiment.seed)


def _trainee(case: Sharded, devices: DeviceMesh, sample: Batch) -> Assembled:
    device = sample.inputs[0].device
    plain = assemble(case.experiment, device, None, sample)
    model = _SHARD[case.fsdp](plain.model, plain.blocks, case.experiment.mesh, devices, dtype="fp32")
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.experiment.learning_rate)
    return replace(plain, model=model, call=model, optimizer=optimizer)


def attend_over_parts(dtype: str, context: RankContext) -> dict[str, Any]:
    """Return how far torch's ring over all ranks is from attention of whole sequences."""
    devices = init_device_mesh(context.device.type, (dist.get_world_size(),))
    return {"errors": errors_of_ring(devices, dtype=getattr(torch, dtype), is_causal=True)}
