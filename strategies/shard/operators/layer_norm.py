"""`layer_norm`: output = (input - mean) / deviation * weight + bias, over the last dimensions.

    input (b0, …, *normalized) x weight (*normalized) -> output (b0, …, *normalized)      + bias

A mesh axis replicates or shards one of the `b` batch dimensions, which all-reduces the gradients of weight
and bias: `(b + 1)^axes` candidates where everything divides, those of DTensor's rule for
`aten.native_layer_norm`. What is normalised over stays whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the name everybody uses)

from strategies.errors import StrategyError
from strategies.shard.candidates.candidate import Candidate
from strategies.shard.candidates.cost import Hardware
from strategies.shard.candidates.derivation import DEFAULT_HARDWARE
from strategies.shard.candidates.enumeration import Mode, enumerate_candidates
from strategies.shard.candidates.layout import Shape, checked_shape, sharding_sequence
from strategies.shard.candidates.operation import Choice, LocalOperands, Operation, described


def candidates(
    input_shape: Sequence[int],
    normalized_shape: Sequence[int],
    mesh_shape: Sequence[int],
    mode: Mode = "classic",
    *,
    elementwise_affine: bool = True,
    bias: bool = True,
    eps: float = 1e-5,
    dtype: torch.dtype = torch.float32,
    hardware: Hardware = DEFAULT_HARDWARE,
) -> tuple[Candidate, ...]:
    """Return the sharding candidates of a layer norm, full replication first.

    The peer misses none: `classic` is `complete`, on two axes 4 for a matrix, 16 for four dimensions.

    Args:
        input_shape: ends in `normalized_shape`; what comes before are batch dimensions.
        normalized_shape: the dimensions that are normalised over.
        mesh_shape: sizes of the mesh axes.
        mode: `classic` or `complete`.
        elementwise_affine: whether there is a weight.
        bias: whether there is a bias, too, where there is a weight.
        eps: added to the variance.
        dtype: of all operands.
        hardware: what costs are reckoned on.

    Raises:
        StrategyError: a shape or the mode is none, or the input does not end in `normalized_shape`.
    """
    shape = checked_shape("input_shape", input_shape)
    normalized = checked_shape("normalized_shape", normalized_shape)
    if shape[-len(normalized) :] != normalized:
        raise StrategyError("normalized_shape", f"must be how {shape} ends, got {normalized}")
    batch = len(shape) - len(normalized)
    whole = (None,) * len(normalized)
    labels = (*(f"b{dim}" for dim in range(batch)), *whole)
    parameters = ("weight", "bias")[: elementwise_affine * (1 + bias)]
    operation = Operation(
        name="layer_norm",
        inputs=(
            described("input", shape, labels),
            *(described(name, normalized, whole, type="param") for name in parameters),
        ),
        outputs=(described("output", shape, labels, type="output"),),
        terms=(("input", *parameters[:1]), *((name,) for name in parameters[1:])),
        dtype=dtype,
        forward_flops=0,
        backward_flops=0,
        compute=partial(_compute, normalized=normalized, eps=eps),
    )
    return enumerate_candidates(
        operation, checked_shape("mesh_shape", mesh_shape), mode, name=_name, hardware=hardware
    )


def from_module(
    module: nn.LayerNorm,
    input_shape: Sequence[int],
    mesh_shape: Sequence[int],
    mode: Mode = "classic",
    *,
    dtype: torch.dtype = torch.float32,
    hardware: Hardware = DEFAULT_HARDWARE,
) -> tuple[Candidate, ...]:
    """Return the candidates of an `nn.LayerNorm`, which may be on the meta device.

    `dtype` is that of the input; a module without parameters does not know it.

    Raises:
        StrategyError: as `candidates`.
    """
    return candidates(
        input_shape,
        module.normalized_shape,
        mesh_shape,
        mode,
        elementwise_affine=module.elementwise_affine,
        bias=module.bias is not None,
        eps=module.eps,
        dtype=dtype,
        hardware=hardware,
    )


def _compute(local: LocalOperands, *, normalized: Shape, eps: float) -> Tensor:
    tensors = local.tensors
    weight, bias = tensors.get("weight"), tensors.get("bias")
    if local.finish is None:
        return F.layer_norm(tensors["input"], normalized, weight, bias, eps)
    product = local.finish(F.layer_norm(tensors["input"], normalized, weight, eps=eps))
    return product if bias is None else product + bias


def _name(operation: Operation, choices: tuple[Choice, ...]) -> str:
    """Return `[S0, R] = [S0, R] x [R]`; the peer calls full replication `RR = RR x R` in any dimension."""
    if not any(choices):
        return "RR = RR x R"
    output = operation.outputs[0]
    weight = operation.inputs[1:2]
    specs = [
        f"[{', '.join(sharding_sequence(operand.placements(choices), len(operand.shape)))}]"
        for operand in (output, operation.inputs[0], *weight)
    ]
    return f"{specs[0]} = {' x '.join(specs[1:])}"
