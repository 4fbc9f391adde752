"""Norms: `layer_norm`, and `batch_norm` in training. ColossalAI misses none of their candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (the name everybody uses)

from strategies.base import StrategyError
from strategies.shard.candidates.layout import Shape, checked_shape
from strategies.shard.candidates.naming import name_batch_norm, name_layer_norm
from strategies.shard.candidates.operation import LocalOperands, Operation, operand

_CHANNEL = 1


def layer_norm(
    input_shape: Sequence[int],
    normalized_shape: Sequence[int],
    *,
    elementwise_affine: bool = True,
    bias: bool = True,
    eps: float = 1e-5,
) -> Operation:
    """Describe output = (input - mean) / deviation * weight + bias, over the last dimensions.

        input (b0, …, *normalized) x weight (*normalized) -> output (b0, …, *normalized)      + bias

    A mesh axis replicates or shards one of the `b` batch dimensions, which all-reduces the gradients of
    weight and bias: (b + 1)^axes candidates where everything divides, those of DTensor's rule for
    `aten.native_layer_norm`. What is normalised over stays whole.

    Args:
        input_shape: ends in `normalized_shape`; what comes before are batch dimensions.
        normalized_shape: sizes of the dimensions that are normalised over.
        bias: whether there is a bias, too, where there is a weight.
        eps: number added to the variance.

    Raises:
        StrategyError: a shape is empty, a size is below 1, or the input does not end in
            `normalized_shape`.
    """
    shape = checked_shape("input_shape", input_shape)
    normalized = checked_shape("normalized_shape", normalized_shape)
    if shape[-len(normalized) :] != normalized:
        raise StrategyError("normalized_shape", f"must be how {shape} ends, got {normalized}")
    whole = (None,) * len(normalized)
    labels = (*(f"b{dim}" for dim in range(len(shape) - len(normalized))), *whole)
    parameters = ("weight", "bias")[: elementwise_affine * (1 + bias)]
    return Operation(
        name="layer_norm",
        inputs=(
            operand("input", shape, labels),
            *(operand(name, normalized, whole, "param") for name in parameters),
        ),
        outputs=(operand("output", shape, labels, "output"),),
        terms=(("input", *parameters[:1]), *((name,) for name in parameters[1:])),
        compute=partial(_layer_norm, normalized=normalized, eps=eps),
        naming=name_layer_norm,
    )


def batch_norm(
    input_shape: Sequence[int],
    *,
    affine: bool = True,
    track_running_stats: bool = True,
    eps: float = 1e-5,
    momentum: float = 0.1,
) -> Operation:
    """Describe output = (input - mean) / deviation * weight + bias, over all but the channels.

        input (batch, channel, …) x weight (channel) -> output (batch, channel, …)      + bias (channel)

    A mesh axis replicates, or shards the channels or the batch: 3^axes candidates where everything divides.
    Statistics are those of the whole batch: where it is sharded, the sums of the values and of the squares of
    their distances from the mean are all-reduced, and so are their gradients. DTensor's rule for
    `aten.native_batch_norm` shards channels only. In evaluation a batch norm is elementwise.

    Args:
        input_shape: `(batch, channel, …)`.
        track_running_stats: whether there are running statistics; they are updated in place.
        eps: number added to the variance.
        momentum: share of the new statistics in the running ones.

    Raises:
        StrategyError: the shape is empty, a size is below 1, or a channel has a single value.
    """
    shape = checked_shape("input_shape", input_shape)
    values = prod(shape) // prod(shape[_CHANNEL : _CHANNEL + 1])
    if len(shape) <= _CHANNEL or values == 1:
        raise StrategyError("input_shape", f"must have more than one value for each channel, got {shape}")
    labels = ("batch", "channel", *(None for _ in shape[2:]))
    channels, label = [shape[_CHANNEL]], ["channel"]
    affines = ("weight", "bias") if affine else ()
    running = ("running_mean", "running_var") if track_running_stats else ()
    return Operation(
        name="batch_norm",
        inputs=(
            operand("input", shape, labels),
            *(operand(name, channels, label, "param") for name in affines),
            *(replace(operand(name, channels, label, "buffer"), is_differentiable=False) for name in running),
        ),
        outputs=(operand("output", shape, labels, "output"),),
        terms=(("input", *affines[:1], *running), *((name,) for name in affines[1:])),
        compute=partial(_batch_norm, values=values, eps=eps, momentum=momentum),
        naming=name_batch_norm,
        statistics=tuple(
            operand(name, channels, label, dtype=torch.float32) for name in ("mean", "variance")
        ),
    )


def _layer_norm(local: LocalOperands, *, normalized: Shape, eps: float) -> Tensor:
    """Normalise a part; where its gradients are to be reduced, weight and bias come after that."""
    tensors = local.tensors
    weight, bias = tensors.get("weight"), tensors.get("bias")
    if local.finish is None:
        return F.layer_norm(tensors["input"], normalized, weight, bias, eps)
    product = local.finish(F.layer_norm(tensors["input"], normalized, weight, eps=eps))
    return product if bias is None else product + bias


def _batch_norm(local: LocalOperands, *, values: int, eps: float, momentum: float) -> Tensor:
    tensors = local.tensors
    whole = tensors["input"]
    precise = whole.to(torch.promote_types(whole.dtype, torch.float32))
    dims = [dim for dim in range(whole.dim()) if dim != _CHANNEL]
    like_input = (-1, *(1 for _ in whole.shape[2:]))
    mean = local.synchronise("mean", precise.sum(dims)) / values
    centred = precise - mean.view(like_input)
    variance = local.synchronise("variance", centred.square().sum(dims)) / values
    if "running_mean" in tensors:
        unbiased = variance * (values / (values - 1))
        with torch.no_grad():
            for name, statistic in (("running_mean", mean), ("running_var", unbiased)):
                tensors[name].lerp_(statistic.to(tensors[name].dtype), momentum)
    normalised = (centred * torch.rsqrt(variance + eps).view(like_input)).to(whole.dtype)
    if "weight" not in tensors:
        return local.finished(normalised)
    product = local.finished(normalised * tensors["weight"].view(like_input))
    return product + tensors["bias"].view(like_input)
