"""Parallelism of a model on a mesh: tensor parallelism, FSDP2, FSDP1, DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from harness.errors import ConfigError
from harness.experiment.experiment import Experiment
from harness.experiment.mesh import Coordinate, Mesh
from harness.measure.routing import RoutingLog
from harness.models.base import Batch, LossFunction
from harness.models.parts.context_attention import Ring
from harness.models.parts.expert_dispatch import ExpertDispatch, shared_experts
from harness.models.parts.torch_context import dispatched_by_torch, require_rules
from strategies.estimate.patched import replaced
from strategies.shard.model.realisation import sum_gradients
from strategies.shard.model.shard_plan import ShardPlan


class SummedGradients(ParallelStyle):
    """A module that each rank runs on its own heads: its parameters are whole, and their gradients sums."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return sum_gradients(module, device_mesh)


class GatheredInput(ParallelStyle):
    """A module whose first input, a part of the sequence on each rank, is gathered; the others are whole."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(part: Tensor) -> Tensor:
            if not isinstance(part, DTensor):
                part = DTensor.from_local(part, device_mesh, [Shard(1)], run_check=False)
            # a DTensor, so that the gradients of all that read it are summed before they are scattered
            return part.redistribute(placements=[Replicate()])

        return _with_first_input(module, gather)


class ScatteredInput(ParallelStyle):
    """A module whose first input is whole; each rank goes on with its part of the sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def scatter(whole: Tensor) -> Tensor:
            replicated = DTensor.from_local(whole, device_mesh, [Replicate()], run_check=False)
            return replicated.redistribute(placements=[Shard(1)]).to_local()

        return _with_first_input(module, scatter)


def _with_first_input(module: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
    """Let a module read `change` of its first input, given by position or by name."""

    def changed(_module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if args:
            return (change(args[0]), *args[1:]), named
        first = next(iter(named))
        return args, {**named, first: change(named[first])}

    module.register_forward_pre_hook(changed, with_kwargs=True)
    return module


class SequenceGathered(ParallelStyle):
    """A norm of parts of the sequence whose output is the whole."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = SequenceParallel()._apply(module, device_mesh)  # noqa: SLF001 (what `parallelize_module` calls)
        whole = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
        return whole._apply(module, device_mesh)  # noqa: SLF001 (as above)


STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "column": ColwiseParallel,
    "row": RowwiseParallel,
    "summed": SummedGradients,
    "column_gathered": partial(ColwiseParallel, output_layouts=Replicate()),
    "row_scattered": partial(RowwiseParallel, input_layouts=Replicate()),
}
"""Ways to split a module, by the words of tensor parallel plans."""

_LOGITS = partial(ColwiseParallel, output_layouts=Shard(-1), use_local_output=False)
STYLES_OF_PARTS: Mapping[str, Callable[[], ParallelStyle]] = {
    "sequence": SequenceParallel,
    "sequence_gathered": SequenceGathered,
    "gathered_input": GatheredInput,
    "scattered_input": ScatteredInput,
    "row_to_sequence": partial(RowwiseParallel, output_layouts=Shard(1)),
    "embedding_to_sequence": partial(RowwiseParallel, input_layouts=Replicate(), output_layouts=Shard(1)),
    "scattered": partial(PrepareModuleOutput, output_layouts=Replicate(), desired_output_layouts=Shard(1)),
    "column_from_sequence": partial(ColwiseParallel, input_layouts=Shard(1), output_layouts=Replicate()),
    "column_to_logits": _LOGITS,
    "column_from_sequence_to_logits": partial(_LOGITS, input_layouts=Shard(1)),
}
"""Those of `mesh.sp` and `mesh.loss_parallel`, which our models' own plans have."""


def device_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh | None:
    """Return the named device mesh of `mesh`, or `None` for one rank; called once a process."""
    if mesh.world_size == 1:
        return None
    names = [name for name in Coordinate._fields if name not in {"pp", "cp"} or getattr(mesh, name) > 1]
    sizes = {name: getattr(mesh, name) for name in names}
    if mesh.ep > 1:  # ranks that share experts are next to each other
        apart = {"expert_shard": mesh.dp_shard * mesh.cp // mesh.ep, "expert": mesh.ep // mesh.cp}
        parts = ((name, apart if name == "dp_shard" else {name: size}) for name, size in sizes.items())
        sizes = {name: size for _, part in parts for name, size in part.items()}
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def split_experts(
    model: nn.Module,
    experiment: Experiment,
    devices: DeviceMesh | None,
    log: RoutingLog,
    *,
    is_dense: bool = False,
) -> nn.Module:
    """Return the model with the experts that this rank has, and tokens that go to those of others, in place.

    Args:
        model: plain, or on the way to be.
        experiment: description of the trial.
        devices: the device mesh; `None` for one rank.
        log: watches the routers.
        is_dense: all experts stay; what is beyond their capacity is dropped as on the mesh.
    """
    mesh = experiment.mesh
    if devices is None or mesh.ep == 1:
        return model
    experts = _joined(devices, ("expert",), mesh)
    dispatch = ExpertDispatch(group=experts.get_group(), size=mesh.ep, capacity=mesh.ep_capacity)
    for router, mixture in experiment.model.mixtures(model).items():
        if is_dense:
            mixture.limit(mesh.ep_capacity)
            continue
        count = mixture.n_experts // mesh.ep
        first = experts.get_local_rank() * count
        mixture.share(range(first, first + count), dispatch, log.watch(router))
    return model


def split_context(model: nn.Module, experiment: Experiment, devices: DeviceMesh | None) -> nn.Module:
    """Return the model with attention over the parts of sequences that the ranks of `cp` hold, in place.

    Raises:
        ConfigError: torch's own method has no rules for this device.
    """
    mesh = experiment.mesh
    if devices is not None and mesh.cp > 1:
        if mesh.cp_method == "torch":
            require_rules(devices.device_type)
        ring = Ring(devices["cp"].get_group(), mesh.cp, devices.get_local_rank("cp"), devices["cp"])
        experiment.model.attend_over_parts(model, mesh.cp_method, ring)
    return model


def mean_over_context(devices: DeviceMesh | None, mesh: Mesh, loss: LossFunction) -> LossFunction:
    """Return a loss with the gradient of `loss`, and the value of its mean over all parts of sequences."""
    if devices is None or mesh.cp == 1:
        return loss
    group = devices["cp"].get_group()

    def mean(outputs: Any, batch: Batch) -> Tensor:
        own = loss(outputs, batch)
        total = own.detach().clone()
        dist.all_reduce(total, group=group)
        return own + (total / mesh.cp - own).detach()

    return mean


def split_tensors(
    model: nn.Module, experiment: Experiment, devices: DeviceMesh | None, sharding: ShardPlan | None
) -> nn.Module:
    """Return the model as its variant shards it over the ranks of `tp`, or as its own plan does, in place.

    Args:
        model: plain, or on the way to be.
        devices: the device mesh; `None` for one rank.
        sharding: plan of the sharding variant, where it has one.
    """
    if devices is None or experiment.mesh.tp == 1:
        return model
    if experiment.is_sharded and sharding is not None:
        return experiment.shard.realise(model, sharding, devices["tp"])
    mesh = experiment.mesh
    plan = experiment.model.split_plan(sp=mesh.sp, loss_parallel=mesh.loss_parallel)
    known = {**STYLES, **STYLES_OF_PARTS}
    styles = {pattern: known[style]() for pattern, style in plan.items()}
    return parallelize_module(model, devices["tp"], styles)


def whole_loss(loss: LossFunction) -> LossFunction:
    """Return a loss that gives a plain tensor: of logits in parts every rank has the whole loss."""

    def whole(outputs: Any, batch: Batch) -> Tensor:
        given = loss(outputs, batch)
        return given.to_local() if isinstance(given, DTensor) else given

    return whole


@contextmanager
def step_context(mesh: Mesh) -> Iterator[None]:
    """Let a loss of logits in parts, attention over parts by torch, and the backward of both run inside."""
    with (
        loss_parallel() if mesh.loss_parallel else nullcontext(),
        dispatched_by_torch() if mesh.cp_method == "torch" else nullcontext(),
    ):
        yield


def distribute(
    model: nn.Module, units: Mapping[str, nn.Module], experiment: Experiment, devices: DeviceMesh | None
) -> nn.Module:
    """Return the model as the data-parallel ranks of the mesh hold it.

    Args:
        units: modules of it that become units of FSDP, by FQN.
        devices: the device mesh; `None` for one rank.
    """
    mesh = experiment.mesh
    if devices is None or mesh.gradient_ranks == 1:
        return model
    if not mesh.is_sharded:
        replicas = _joined(devices, ("dp_replicate",), mesh)
        return DistributedDataParallel(model, process_group=replicas.get_group())
    shard = shard_fsdp1 if mesh.fsdp == "fsdp1" else shard_fsdp2
    return shard(model, units, mesh, devices, dtype=experiment.dtype)


def _joined(devices: DeviceMesh, names: tuple[str, ...], mesh: Mesh) -> DeviceMesh:
    """Return the ranks of some dimensions, with those that hold other parts of the same sequences."""
    names = names if mesh.cp == 1 else (*names, "cp")
    return devices[names[0]] if len(names) == 1 else devices[names]._flatten()  # noqa: SLF001 (no public name)


def _shards(devices: DeviceMesh, mesh: Mesh) -> DeviceMesh:
    """Return the mesh of FSDP: shards, or replicas of shards."""
    are_apart = "expert" in (devices.mesh_dim_names or ())  # of the dense model too
    shards = _joined(devices, ("expert_shard", "expert") if are_apart else ("dp_shard",), mesh)
    if mesh.dp_replicate == 1:
        return shards
    return devices["dp_replicate", shards.mesh_dim_names[0] if shards.mesh_dim_names else "dp_shard"]


def _shards_of_experts(devices: DeviceMesh, mesh: Mesh) -> DeviceMesh:
    """Return the mesh of FSDP for the experts of a rank, which ranks with other experts have no part of."""
    return devices["expert_shard"] if mesh.dp_replicate == 1 else devices["dp_replicate", "expert_shard"]


def shard_fsdp2(
    model: nn.Module, units: Mapping[str, nn.Module], mesh: Mesh, devices: DeviceMesh, *, dtype: str
) -> nn.Module:
    """Make every unit and the rest of `model` an FSDP2 unit, in place.

    A unit has one dtype: a module inside whose own parameters have another becomes a unit of its own.
    """
    pin = devices.device_type == "cuda"
    options: dict[str, Any] = {
        "mesh": _shards(devices, mesh),
        "reshard_after_forward": mesh.reshard_after_forward,
        "mp_policy": _mixed_precision(dtype),
        "offload_policy": CPUOffloadPolicy(pin_memory=pin) if mesh.cpu_offload else OffloadPolicy(),
    }
    of_experts = {**options, "mesh": _shards_of_experts(devices, mesh)} if mesh.ep > 1 else {}
    for experts in shared_experts(model) if mesh.ep > 1 else ():
        fully_shard(experts, **of_experts)
    for unit in (*units.values(), model):
        dtypes = (*_own_dtypes(unit), *(parameter.dtype for parameter in unit.parameters()))
        for part in _of_other_dtypes(unit, next(iter(dtypes), torch.float32)):
            fully_shard(part, **options)
        fully_shard(unit, **options)
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


@contextmanager
def unreduced(model: nn.Module) -> Iterator[None]:
    """Let forward and backward inside the scope leave each data-parallel rank its own gradients.

    Args:
        model: what `distribute` returned for several data-parallel ranks.
    """
    if isinstance(model, DistributedDataParallel | FullyShardedDataParallel):
        with model.no_sync():
            yield
        return
    assert isinstance(model, FSDPModule), "several data-parallel ranks hold a model of DDP or FSDP"
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def require_shardable(
    model: nn.Module, units: Mapping[str, nn.Module], fsdp: str, *, use_orig_params: bool
) -> None:
    """Refuse a model that FSDP cannot shard.

    Args:
        model: as it was made, with or without memory.
        units: modules of the model that become units, by FQN.
        fsdp: `fsdp1` or `fsdp2`.
        use_orig_params: FSDP1 keeps the parameters as they are.

    Raises:
        ConfigError: naming the parameter or module.
    """
    if fsdp == "fsdp1":
        inside = {parameter for unit in units.values() for parameter in unit.parameters()}
        rest = [parameter for parameter in model.parameters() if parameter not in inside]
        for fqn, parameters in [
            *((fqn, [*unit.parameters()]) for fqn, unit in units.items()),
            ("model", rest),
        ]:
            _require_flat(fqn, parameters, use_orig_params=use_orig_params)
        return
    _require_apart(units)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            problem = f"FSDP2 shards no scalar, such as {name!r}; give it the shape (1,), or use mesh=ddp2"
            raise ConfigError("mesh.dp_shard", problem)
    for name, module in model.named_modules():
        dtypes = _own_dtypes(module)
        if len(dtypes) > 1:
            held = f"{name or type(module).__name__!r} holds parameters of {' and '.join(map(str, dtypes))}"
            problem = "a unit of FSDP2 has one dtype; put them into modules of their own, or use mesh=ddp2"
            raise ConfigError("mesh.dp_shard", f"{held}, and {problem}")


def _require_apart(units: Mapping[str, nn.Module]) -> None:
    """Refuse a parameter that two units of FSDP2 share."""
    first: dict[nn.Parameter, str] = {}
    for fqn, unit in units.items():
        for name, parameter in unit.named_parameters(prefix=fqn):
            owner = first.setdefault(parameter, fqn)
            if owner != fqn:
                problem = f"{name!r} is a parameter of {owner!r} too, and units of FSDP2 share none"
                raise ConfigError(
                    "mesh.dp_shard", f"{problem}; tie weights inside of one block, or use mesh=ddp2"
                )


def _require_flat(fqn: str, parameters: list[nn.Parameter], *, use_orig_params: bool) -> None:
    """Refuse a unit that FSDP1 cannot flatten."""
    dtypes = dict.fromkeys(parameter.dtype for parameter in parameters)
    if len(dtypes) > 1:
        held = f"{fqn!r} holds parameters of {' and '.join(map(str, dtypes))}"
        raise ConfigError("mesh.fsdp", f"{held}, and a unit of FSDP1 has one dtype; use mesh.fsdp=fsdp2")
    if not use_orig_params and len({parameter.requires_grad for parameter in parameters}) > 1:
        problem = f"must be true: some parameters of {fqn!r} are frozen and some are not"
        raise ConfigError("mesh.use_orig_params", f"{problem}; or use mesh.fsdp=fsdp2")


def _of_other_dtypes(module: nn.Module, dtype: torch.dtype) -> Iterator[nn.Module]:
    """Yield the modules inside, deepest first, whose own parameters are not of `dtype`; units stay closed."""
    for child in module.children():
        if isinstance(child, FSDPModule):
            continue
        own = next(iter(_own_dtypes(child)), dtype)
        yield from _of_other_dtypes(child, own)
        if own is not dtype:
            yield child


def _own_dtypes(module: nn.Module) -> dict[torch.dtype, None]:
    return dict.fromkeys(parameter.dtype for parameter in module.parameters(recurse=False))


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
