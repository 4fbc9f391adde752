"""`batch_norm`: output = (input - mean) / deviation * weight + bias, over all but the channels; training.

    input (batch, channel, …) x weight (channel) -> output (batch, channel, …)      + bias (channel)

A mesh axis replicates, or shards the channels or the batch: 3^axes candidates where everything divides.
Statistics are those of the whole batch: where it is sharded, the sums of the values and of the squares of
their distances from the mean are all-reduced, and so are their gradients. DTensor's rule for
`aten.native_batch_norm` shards channels only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor, nn

from strategies.errors import StrategyError
from strategies.shard.candidates.candidate import Candidate
from strategies.shard.candidates.cost import Hardware
from strategies.shard.candidates.derivation import DEFAULT_HARDWARE
from strategies.shard.candidates.enumeration import Mode, enumerate_candidates
from strategies.shard.candidates.layout import checked_shape
from strategies.shard.candidates.operation import (
    Choice,
    Dimensions,
    LocalOperands,
    OperandType,
    Operation,
    described,
)
from strategies.shard.candidates.products import name_in_rows

_CHANNEL = 1


def candidates(
    input_shape: Sequence[int],
    mesh_shape: Sequence[int],
    mode: Mode = "classic",
    *,
    affine: bool = True,
    track_running_stats: bool = True,
    eps: float = 1e-5,
    momentum: float = 0.1,
    dtype: torch.dtype = torch.float32,
    hardware: Hardware = DEFAULT_HARDWARE,
) -> tuple[Candidate, ...]:
    """Return the sharding candidates of a batch norm in training, full replication first.

    The peer misses none: `classic` is `complete`, 9 on two axes. In evaluation a batch norm is
    elementwise.

    Args:
        input_shape: `(batch, channel, …)`.
        mesh_shape: sizes of the mesh axes.
        mode: `classic` or `complete`.
        affine: whether there are weight and bias.
        track_running_stats: whether there are running statistics; they are updated in place.
        eps: added to the variance.
        momentum: share of the new statistics in the running ones.
        dtype: of all operands; statistics of half precision are summed in single.
        hardware: what costs are reckoned on.

    Raises:
        StrategyError: a shape or the mode is none, or a channel has a single value.
    """
    shape = checked_shape("input_shape", input_shape)
    values = prod(shape) // prod(shape[_CHANNEL : _CHANNEL + 1])
    if len(shape) <= _CHANNEL or values == 1:
        raise StrategyError("input_shape", f"must have more than one value for each channel, got {shape}")
    labels: tuple[Choice, ...] = ("batch", "channel", *(None for _ in shape[2:]))
    running = ("running_mean", "running_var") if track_running_stats else ()
    statistic = torch.promote_types(dtype, torch.float32)
    operation = Operation(
        name="batch_norm",
        inputs=(
            described("input", shape, labels),
            *(_of_channel(shape[_CHANNEL], name, "param") for name in ("weight", "bias") if affine),
            *(_of_channel(shape[_CHANNEL], name, "buffer") for name in running),
        ),
        outputs=(described("output", shape, labels, type="output"),),
        terms=(("input", "weight", *running), ("bias",)) if affine else (("input", *running),),
        dtype=dtype,
        forward_flops=0,
        backward_flops=0,
        compute=partial(_compute, values=values, eps=eps, momentum=momentum),
        statistics=tuple(
            _of_channel(shape[_CHANNEL], name, "arg", dtype=statistic) for name in ("mean", "variance")
        ),
    )
    return enumerate_candidates(
        operation, checked_shape("mesh_shape", mesh_shape), mode, name=_name, hardware=hardware
    )


def from_module(
    module: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d,
    input_shape: Sequence[int],
    mesh_shape: Sequence[int],
    mode: Mode = "classic",
    *,
    dtype: torch.dtype = torch.float32,
    hardware: Hardware = DEFAULT_HARDWARE,
) -> tuple[Candidate, ...]:
    """Return the candidates of a batch norm module in training, which may be on the meta device.

    `dtype` is that of the input; a module without parameters does not know it. Counting batches
    (`num_batches_tracked`) stays with the module.

    Raises:
        StrategyError: as `candidates`; or the input has other channels, or the module is in evaluation
            or averages over all batches.
    """
    if not module.training:
        raise StrategyError("module", "must be training, got one in evaluation; see elementwise")
    if module.momentum is None:
        raise StrategyError("module", "must have a momentum, got None")
    if tuple(input_shape[_CHANNEL : _CHANNEL + 1]) != (module.num_features,):
        raise StrategyError(
            "input_shape", f"must have {module.num_features} channels, got {tuple(input_shape)}"
        )
    return candidates(
        input_shape,
        mesh_shape,
        mode,
        affine=module.affine,
        track_running_stats=module.running_mean is not None,
        eps=module.eps,
        momentum=module.momentum,
        dtype=dtype,
        hardware=hardware,
    )


def _of_channel(
    channels: int, name: str, type_: OperandType, *, dtype: torch.dtype | None = None
) -> Dimensions:
    return Dimensions(
        name=name,
        type=type_,
        shape=(channels,),
        labels=("channel",),
        logical=((0,),),
        is_differentiable=type_ != "buffer",
        dtype=dtype,
    )


def _compute(local: LocalOperands, *, values: int, eps: float, momentum: float) -> Tensor:
    tensors = local.tensors
    whole = tensors["input"]
    precise = whole.to(torch.promote_types(whole.dtype, torch.float32))
    dims = [dim for dim in range(whole.dim()) if dim != _CHANNEL]
    like_input = (-1, *(1 for _ in whole.shape[2:]))
    mean = local.synchronise("mean", precise.sum(dims)) / values
    centred = precise - mean.view(like_input)
    variance = local.synchronise("variance", centred.square().sum(dims)) / values
    if "running_mean" in tensors:
        _update(tensors["running_mean"], mean, momentum)
        _update(tensors["running_var"], variance * (values / (values - 1)), momentum)
    normalised = (centred * torch.rsqrt(variance + eps).view(like_input)).to(whole.dtype)
    if "weight" not in tensors:
        return local.finished(normalised)
    product = local.finished(normalised * tensors["weight"].view(like_input))
    return product + tensors["bias"].view(like_input)


def _update(running: Tensor, statistic: Tensor, momentum: float) -> None:
    with torch.no_grad():
        running.lerp_(statistic.to(running.dtype), momentum)


def _name(operation: Operation, choices: tuple[Choice, ...]) -> str:
    name = name_in_rows(operation, choices)
    return f"{name} WITH SYNC_BN" if "batch" in choices else name
