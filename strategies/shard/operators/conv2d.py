"""`conv2d`: output = convolution of input with weight, + bias.

    input (batch, cin, h, w) x weight (cout, cin, kh, kw) -> output (batch, cout, h', w')     + bias (cout)

A mesh axis replicates, or shards the batch or the channels on either side: 4^axes candidates where
everything divides. With groups, whole groups are sharded instead of channels, on both sides at once.
Height and width are not: neighbours would exchange halos. DTensor's rule for `aten.convolution` has the
batch only; the channels follow from the convolution being a matrix product over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the name everybody uses)

from strategies.errors import StrategyError
from strategies.shard.candidates.candidate import Candidate
from strategies.shard.candidates.cost import Hardware
from strategies.shard.candidates.derivation import DEFAULT_HARDWARE
from strategies.shard.candidates.enumeration import Mode, enumerate_candidates
from strategies.shard.candidates.layout import Shape, checked_shape
from strategies.shard.candidates.operation import Dimensions, LocalOperands, Operation, described
from strategies.shard.candidates.products import name_in_rows

_DIMS = 4


class _Window(NamedTuple):
    """How the kernel moves, each for height and width."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]


def candidates(
    input_shape: Sequence[int],
    weight_shape: Sequence[int],
    mesh_shape: Sequence[int],
    mode: Mode = "classic",
    *,
    bias: bool = True,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    dtype: torch.dtype = torch.float32,
    hardware: Hardware = DEFAULT_HARDWARE,
) -> tuple[Candidate, ...]:
    """Return the sharding candidates of a convolution, full replication first.

    The peer misses none: `classic` is `complete`, 16 on two axes.

    Args:
        input_shape: `(batch, cin, h, w)`.
        weight_shape: `(cout, cin / groups, kh, kw)`.
        mesh_shape: sizes of the mesh axes.
        mode: `classic` or `complete`.
        bias: whether there is one.
        stride: of the kernel, as `F.conv2d` has it.
        padding: with zeros, the same.
        dilation: of the kernel, the same.
        groups: into which channels are divided.
        dtype: of all operands.
        hardware: what costs are reckoned on.

    Raises:
        StrategyError: a shape or the mode is none, or there is no such convolution.
    """
    image, kernel = checked_shape("input_shape", input_shape), checked_shape("weight_shape", weight_shape)
    _check(image, kernel, groups)
    window = _Window(_pair("stride", stride), _pair("padding", padding), _pair("dilation", dilation))
    shape = (image[0], kernel[0], *_extents(image, kernel, window))
    flops = 2 * prod(shape) * prod(kernel[1:])
    inputs, output = _described(image, kernel, shape, is_grouped=groups > 1, bias=bias)
    operation = Operation(
        name="conv2d",
        inputs=inputs,
        outputs=(output,),
        terms=(("input", "weight"), ("bias",))[: 1 + bias],
        dtype=dtype,
        forward_flops=flops,
        backward_flops=2 * flops,
        compute=partial(_compute, window=window, groups=groups),
        limits=(("group", groups),) if groups > 1 else (),
    )
    return enumerate_candidates(
        operation, checked_shape("mesh_shape", mesh_shape), mode, name=name_in_rows, hardware=hardware
    )


def from_module(
    module: nn.Conv2d,
    input_shape: Sequence[int],
    mesh_shape: Sequence[int],
    mode: Mode = "classic",
    *,
    hardware: Hardware = DEFAULT_HARDWARE,
) -> tuple[Candidate, ...]:
    """Return the candidates of an `nn.Conv2d`, which may be on the meta device.

    Raises:
        StrategyError: as `candidates`; or the module pads by name, or with something else than zeros.
    """
    if isinstance(module.padding, str) or module.padding_mode != "zeros":
        raise StrategyError(
            "module", f"must pad with a number of zeros, got {module.padding!r} of {module.padding_mode}"
        )
    return candidates(
        input_shape,
        tuple(module.weight.shape),
        mesh_shape,
        mode,
        bias=module.bias is not None,
        stride=module.stride,
        padding=module.padding,
        dilation=module.dilation,
        groups=module.groups,
        dtype=module.weight.dtype,
        hardware=hardware,
    )


def _described(
    image: Shape, kernel: Shape, shape: Shape, *, is_grouped: bool, bias: bool
) -> tuple[tuple[Dimensions, ...], Dimensions]:
    """Return inputs and output; a weight's logical form is transposed, as a linear's."""
    entering, leaving = ("group", "group") if is_grouped else ("cin", "cout")
    inputs = [
        described("input", image, ("batch", entering, None, None)),
        Dimensions(
            name="weight",
            type="param",
            shape=kernel,
            labels=(leaving, None if is_grouped else entering, None, None),
            logical=((1,), (0,), (2,), (3,)),
        ),
    ]
    if bias:
        inputs.append(described("bias", kernel[:1], (leaving,), type="param"))
    return tuple(inputs), described("output", shape, ("batch", leaving, None, None), type="output")


def _compute(local: LocalOperands, *, window: _Window, groups: int) -> Tensor:
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
    if len(image) != _DIMS:
        raise StrategyError("input_shape", f"must be (batch, cin, h, w), got {image}")
    if groups < 1 or image[1] % groups:
        raise StrategyError("groups", f"must divide {image[1]} channels, got {groups}")
    if len(kernel) != _DIMS or kernel[1] != image[1] // groups or kernel[0] % groups:
        raise StrategyError(
            "weight_shape",
            f"must be (cout, {image[1] // groups}, kh, kw) with cout in {groups} even groups, got {kernel}",
        )


def _extents(image: Shape, kernel: Shape, window: _Window) -> Shape:
    """Return height and width of the output."""
    if min(window.stride) < 1 or min(window.dilation) < 1 or min(window.padding) < 0:
        raise StrategyError(
            "stride, padding, dilation", f"must be at least 1, 0 and 1, got {', '.join(map(str, window))}"
        )
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
