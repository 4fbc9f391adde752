"""Operators with a weight that are not plain matrix products: `conv2d` and `embedding`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (the name everybody uses)

from strategies.base import StrategyError
from strategies.shard.candidates.layout import Shape, checked_index, checked_shape
from strategies.shard.candidates.naming import is_classic_embedding, name_in_rows
from strategies.shard.candidates.operation import LocalOperands, Operation, operand

_DIMS = 4


class _Window(NamedTuple):
    """The movement of the kernel, for height and width."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]


def conv2d(
    input_shape: Sequence[int],
    weight_shape: Sequence[int],
    *,
    bias: bool = True,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Operation:
    """Describe a convolution: (batch, cin, h, w) x (cout, cin, kh, kw) -> (batch, cout, h', w'), and (cout).

    A mesh axis replicates, or shards the batch or the channels on either side: 4^axes candidates where
    everything divides. With groups, whole groups are sharded instead of channels, on both sides at once.
    Height and width are not: neighbours would exchange halos. DTensor's rule for `aten.convolution` has the
    batch only; the channels follow from the convolution being a matrix product over them. ColossalAI misses
    none.

    Args:
        input_shape: `(batch, cin, h, w)`.
        weight_shape: `(cout, cin / groups, kh, kw)`.
        stride: stride of the kernel, as `F.conv2d` has it.
        padding: zeros on each side, the same.
        dilation: distance of the kernel's taps, the same.
        groups: number of groups into which channels are divided.

    Raises:
        StrategyError: a shape is empty, a size is below 1, or there is no such convolution.
    """
    image, kernel = checked_shape("input_shape", input_shape), checked_shape("weight_shape", weight_shape)
    _check(image, kernel, groups)
    window = _Window(_pair("stride", stride), _pair("padding", padding), _pair("dilation", dilation))
    shape = (image[0], kernel[0], *_extents(image, kernel, window))
    entering, leaving, kept = ("group", "group", None) if groups > 1 else ("cin", "cout", "cin")
    biases = [operand("bias", kernel[:1], [leaving], "param")] if bias else []
    return Operation(
        name="conv2d",
        inputs=(
            operand("input", image, ("batch", entering, None, None)),
            # its logical form is transposed, as a linear's
            operand("weight", kernel, (leaving, kept, None, None), "param", logical=[[1], [0], [2], [3]]),
            *biases,
        ),
        outputs=(operand("output", shape, ("batch", leaving, None, None), "output"),),
        terms=(("input", "weight"), ("bias",))[: 1 + bias],
        forward_flops=2 * prod(shape) * prod(kernel[1:]),
        compute=partial(_conv2d, window=window, groups=groups),
        naming=name_in_rows,
        limits=(("group", groups),) if groups > 1 else (),
    )


def embedding(
    input_shape: Sequence[int], num_embeddings: int, embedding_dim: int, *, padding_idx: int | None = None
) -> Operation:
    """Describe the rows of a weight that integers ask for: (b0, …) of integers < v, (v, d) -> (b0, …, d).

    A mesh axis replicates, or shards the vocabulary `v`, the width `d`, or one of the `b` batch dimensions:
    (b + 3)^axes candidates where everything divides, those of DTensor's rule for `aten.embedding`. `classic`
    has neither a sharded vocabulary nor two different batch dimensions: 4 + 5·b on two axes.

        v     a rank has zeros where another has the row: the output is all-reduced after the forward
        b_i   the gradient of the weight is partial: all-reduced in the backward

    Args:
        input_shape: shape of the integers, all batch dimensions.
        num_embeddings: `v`.
        embedding_dim: `d`.
        padding_idx: the row that gets no gradient, if any; negative from the end.

    Raises:
        StrategyError: a shape is empty, a size is below 1, or there is no such padding row.
    """
    shape = checked_shape("input_shape", input_shape)
    rows, width = checked_shape("num_embeddings, embedding_dim", (num_embeddings, embedding_dim))
    if padding_idx is not None:
        padding_idx = checked_index("padding_idx", padding_idx, rows)
    labels = tuple(f"b{dim}" for dim in range(len(shape)))
    batch = range(len(shape))
    integers = operand("input", shape, labels, logical=[batch], dtype=torch.int64)
    return Operation(
        name="embedding",
        inputs=(
            replace(integers, is_differentiable=False, below=rows),
            operand("weight", (rows, width), ("v", "d"), "param"),
        ),
        outputs=(
            operand("output", (*shape, width), (*labels, "d"), "output", logical=[batch, [len(shape)]]),
        ),
        terms=(("input", "weight"),),
        compute=partial(_embedding, padding_idx=padding_idx),
        naming=name_in_rows,
        is_classic=is_classic_embedding,
    )


def _conv2d(local: LocalOperands, *, window: _Window, groups: int) -> Tensor:
    """Return the local output; the bias comes after the reduction, or every rank would add it."""
    tensors = local.tensors
    bias = tensors.get("bias")
    own_groups = groups // local.part("group").count
    convolve = partial(F.conv2d, tensors["input"], tensors["weight"], groups=own_groups, **window._asdict())
    if local.finish is None:
        return convolve(bias=bias)
    product = local.finish(convolve())
    return product if bias is None else product + bias[:, None, None]


def _check(image: Shape, kernel: Shape, groups: int) -> None:
    """Refuse shapes of image and kernel that do not belong together."""
    if len(image) != _DIMS:
        raise StrategyError("input_shape", f"must be (batch, cin, h, w), got {image}")
    if groups < 1 or image[1] % groups:
        raise StrategyError("groups", f"must divide {image[1]} channels, got {groups}")
    if len(kernel) != _DIMS or kernel[1] != image[1] // groups or kernel[0] % groups:
        problem = f"must be (cout, {image[1] // groups}, kh, kw) with cout in {groups} even groups"
        raise StrategyError("weight_shape", f"{problem}, got {kernel}")


def _extents(image: Shape, kernel: Shape, window: _Window) -> Shape:
    """Return height and width of the output."""
    if min(window.stride) < 1 or min(window.dilation) < 1 or min(window.padding) < 0:
        problem = "must be at least 1, 0 and 1"
        raise StrategyError("stride, padding, dilation", f"{problem}, got {', '.join(map(str, window))}")
    found = tuple(
        (size + 2 * pad - apart * (taps - 1) - 1) // step + 1
        for size, taps, step, pad, apart in zip(image[2:], kernel[2:], *window, strict=True)
    )
    if min(found) < 1:
        raise StrategyError("weight_shape", f"must fit into an image of {image[2:]}, got {kernel[2:]}")
    return found


def _pair(where: str, value: int | tuple[int, ...]) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    if len(value) != 2:  # noqa: PLR2004 (height and width)
        raise StrategyError(where, f"must be one number or two, got {value}")
    return value[0], value[1]


def _embedding(local: LocalOperands, *, padding_idx: int | None) -> Tensor:
    """Return the local output: zeros where another rank has the row."""
    index, weight = local.tensors["input"], local.tensors["weight"]
    part = local.part("v")
    if part.count == 1:
        return local.finished(F.embedding(index, weight, padding_idx))
    start = part.index * len(weight)
    own = index - start
    elsewhere = (own < 0) | (own >= len(weight))
    own_padding = None
    if padding_idx is not None and 0 <= padding_idx - start < len(weight):
        own_padding = padding_idx - start
    rows = F.embedding(own.masked_fill(elsewhere, 0), weight, own_padding)
    return local.finished(rows.masked_fill(elsewhere.unsqueeze(-1), 0))
