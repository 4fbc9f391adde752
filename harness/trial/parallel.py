"""What a mesh does to a model: tensor parallelism, FSDP2, FSDP1, DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from harness.experiment.mesh import Mesh
from strategies.estimate.patched import replaced

_STYLES: Mapping[str, Callable[[], ParallelStyle]] = {"column": ColwiseParallel, "row": RowwiseParallel}


def device_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh | None:
    """Return the named device mesh of `mesh`, or `None` for one rank; called once a process."""
    if mesh.world_size == 1:
        return None
    shape = (mesh.dp_replicate, mesh.dp_shard, mesh.tp)
    return init_device_mesh(device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))


def dp_rank(mesh: Mesh, rank: int) -> int:
    """Return which share of the batch `rank` sees; tensor-parallel peers see the same."""
    return rank // mesh.tp


def parallelise_tensors(model: nn.Module, plan: Mapping[str, str], devices: DeviceMesh) -> nn.Module:
    """Shard the linears of `plan` over the one dimension of `devices`, in place."""
    styles = {pattern: _STYLES[style]() for pattern, style in plan.items()}
    return parallelize_module(model, devices, styles)


def shard_fsdp2(
    model: nn.Module, units: Mapping[str, nn.Module], mesh: Mesh, devices: DeviceMesh, *, dtype: str
) -> nn.Module:
    """Make every unit and the rest of `model` an FSDP2 unit, in place."""
    pin = devices.device_type == "cuda"
    options: dict[str, Any] = {
        "mesh": devices["dp_replicate", "dp_shard"] if mesh.dp_replicate > 1 else devices["dp_shard"],
        "reshard_after_forward": mesh.reshard_after_forward,
        "mp_policy": _mixed_precision(dtype),
        "offload_policy": CPUOffloadPolicy(pin_memory=pin) if mesh.cpu_offload else OffloadPolicy(),
    }
    for unit in units.values():
        fully_shard(unit, **options)
    fully_shard(model, **options)
    return model


def shard_fsdp1(
    model: nn.Module, units: Mapping[str, nn.Module], mesh: Mesh, devices: DeviceMesh, *, dtype: str
) -> nn.Module:
    """Wrap every unit, in its parent, and `model` itself in `FullyShardedDataParallel`."""
    is_cuda = devices.device_type == "cuda"
    options: dict[str, Any] = {
        "device_mesh": devices["dp_replicate", "dp_shard"] if mesh.dp_replicate > 1 else devices["dp_shard"],
        "sharding_strategy": ShardingStrategy[mesh.sharding_strategy],
        "cpu_offload": CPUOffload(offload_params=mesh.cpu_offload),
        "use_orig_params": mesh.use_orig_params,
        # without a device FSDP1 looks for an accelerator and refuses the CPU
        "device_id": torch.cuda.current_device() if is_cuda else torch.device("cpu"),
    }
    if dtype == "bf16_mixed":
        options["mixed_precision"] = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for fqn, unit in units.items():
        parent, _, child = fqn.rpartition(".")
        setattr(model.get_submodule(parent), child, FullyShardedDataParallel(unit, **options))
    return FullyShardedDataParallel(model, **options)


def replicate(model: nn.Module, devices: DeviceMesh) -> nn.Module:
    """Wrap `model` in DDP over the `dp_replicate` dimension."""
    return DistributedDataParallel(model, process_group=devices["dp_replicate"].get_group())


@contextmanager
def cpu_stands_in_for_cuda(mesh: Mesh, device: torch.device) -> Iterator[None]:
    """Let FSDP1's parameter offload run on a CPU-only build, where host and device are the same memory.

    It pins host buffers and waits for a copy stream unconditionally
    (torch/distributed/fsdp/_flat_param.py); both have nothing to do on the CPU.
    """
    if not (mesh.fsdp == "fsdp1" and mesh.cpu_offload and device.type == "cpu"):
        yield
        return
    with (
        replaced(torch.Tensor, "pin_memory", lambda tensor, *_: tensor),
        replaced(torch.cpu.Stream, "synchronize", lambda _stream: None),
    ):
        yield


def _mixed_precision(dtype: str) -> MixedPrecisionPolicy:
    if dtype != "bf16_mixed":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
