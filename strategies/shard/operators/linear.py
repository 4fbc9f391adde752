"""`linear`: output = input x weight^T + bias, with any number of batch dimensions.

    input (b0, …, k) x weight (n, k) -> output (b0, …, n)      + bias (n)

A mesh axis replicates, or shards the contracted dimension `k`, the output dimension `n`, or one of the
`b` batch dimensions: `(b + 3)^axes` candidates where everything divides.

    k     the output is partial: all-reduced after the forward
    n     the gradient of the input is partial: all-reduced in the backward
    b_i   the gradients of weight and bias are partial: all-reduced in the backward
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the name everybody uses)

from strategies.errors import StrategyError
from strategies.shard.candidates.candidate import Candidate
from strategies.shard.candidates.cost import Hardware
from strategies.shard.candidates.derivation import DEFAULT_HARDWARE
from strategies.shard.candidates.enumeration import Mode, enumerate_candidates
from strategies.shard.candidates.layout import Shape, checked_shape
from strategies.shard.candidates.operation import Dimensions, LocalOperands, OperandType, Operation
from strategies.shard.candidates.products import is_classic_in_rows, name_in_rows

_OF_ONE_DTYPE: Mapping[str, torch.dtype] = MappingProxyType({})


def candidates(
    input_shape: Sequence[int],
    out_features: int,
    mesh_shape: Sequence[int],
    mode: Mode = "classic",
    *,
    bias: bool = True,
    weight_type: OperandType = "param",
    bias_type: OperandType = "param",
    dtype: torch.dtype = torch.float32,
    dtypes: Mapping[str, torch.dtype] = _OF_ONE_DTYPE,
    hardware: Hardware = DEFAULT_HARDWARE,
) -> tuple[Candidate, ...]:
    """Return the sharding candidates of a linear, full replication first.

    `classic` is the set of ColossalAI's linear handler: on two axes it leaves out those that shard
    two different batch dimensions, and those that shard a batch dimension and replicate the rest:
    9 + 5·b candidates. `complete` leaves out none: (b + 3)^axes. What cannot be cut evenly is in
    neither; on axes of size 1 everything is replicated.

    Args:
        input_shape: `(…, k)`; all but the last are batch dimensions.
        out_features: `n`.
        mesh_shape: sizes of the mesh axes.
        mode: `classic` or `complete`.
        bias: whether there is one.
        weight_type: `param`, or `arg` for a weight that the graph computes.
        bias_type: the same for the bias.
        dtype: of operands; it is what bytes are counted in.
        dtypes: of operands that have another.
        hardware: what costs are reckoned on.

    Raises:
        StrategyError: a shape or the mode is none.

    Source: the seed's test of the linear handler (ColossalAI, auto_parallel/tensor_shard).
    """
    types = {"weight": weight_type, "bias": bias_type} if bias else {"weight": weight_type}
    operation = describe(
        checked_shape("input_shape", input_shape),
        checked_shape("out_features", [out_features])[0],
        types=types,
        dtype=dtype,
        dtypes=dtypes,
    )
    return enumerate_candidates(
        operation,
        checked_shape("mesh_shape", mesh_shape),
        mode,
        name=name_in_rows,
        is_classic=is_classic_in_rows,
        hardware=hardware,
    )


def from_module(
    module: nn.Linear,
    input_shape: Sequence[int],
    mesh_shape: Sequence[int],
    mode: Mode = "classic",
    *,
    dtypes: Mapping[str, torch.dtype] = _OF_ONE_DTYPE,
    hardware: Hardware = DEFAULT_HARDWARE,
) -> tuple[Candidate, ...]:
    """Return the candidates of an `nn.Linear`, which may be on the meta device.

    Args:
        module: the linear.
        input_shape: batch dimensions, then its input features.
        mesh_shape: sizes of the mesh axes.
        mode: `classic` or `complete`.
        dtypes: of operands that have another than the weight, as autocast makes them.
        hardware: what costs are reckoned on.

    Raises:
        StrategyError: as `candidates`; or `input_shape` does not end in the module's input features.
    """
    _check_features(input_shape, module.weight)
    return candidates(
        input_shape,
        module.out_features,
        mesh_shape,
        mode,
        bias=module.bias is not None,
        dtype=module.weight.dtype,
        dtypes=dtypes,
        hardware=hardware,
    )


def from_function(
    input: Tensor,  # noqa: A002 (arguments as F.linear has them)
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    mesh_shape: Sequence[int],
    mode: Mode = "classic",
    hardware: Hardware = DEFAULT_HARDWARE,
) -> tuple[Candidate, ...]:
    """Return the candidates of `F.linear(input, weight, bias)`; meta tensors are enough.

    Raises:
        StrategyError: as `candidates`; or the shapes do not multiply.
    """
    _check_features(input.shape, weight)
    return candidates(
        tuple(input.shape),
        weight.shape[0],
        mesh_shape,
        mode,
        bias=bias is not None,
        weight_type=_type_of(weight),
        bias_type=_type_of(bias),
        dtype=input.dtype,
        hardware=hardware,
    )


def describe(
    input_shape: Shape,
    out_features: int,
    *,
    types: dict[str, OperandType],
    dtype: torch.dtype,
    dtypes: Mapping[str, torch.dtype] = _OF_ONE_DTYPE,
) -> Operation:
    """Return the description of a linear; `types` has an entry `bias` where there is one."""
    *batch, in_features = input_shape
    labels = tuple(f"b{dim}" for dim in range(len(batch)))
    rows = tuple(range(len(batch)))
    tensors = [
        Dimensions(
            name="input",
            type="arg",
            shape=input_shape,
            labels=(*labels, "k"),
            logical=(rows, (len(batch),)),
            dtype=dtypes.get("input"),
        ),
        Dimensions(
            name="weight",
            type=types["weight"],
            shape=(out_features, in_features),
            labels=("n", "k"),
            logical=((1,), (0,)),
        ),
    ]
    if "bias" in types:
        tensors.append(
            Dimensions(name="bias", type=types["bias"], shape=(out_features,), labels=("n",), logical=((0,),))
        )
    flops = 2 * prod(batch) * in_features * out_features
    return Operation(
        name="linear",
        inputs=tuple(tensors),
        outputs=(
            Dimensions(
                name="output",
                type="output",
                shape=(*batch, out_features),
                labels=(*labels, "n"),
                logical=(rows, (len(batch),)),
                dtype=dtypes.get("output"),
            ),
        ),
        terms=(("input", "weight"), ("bias",))[: len(types)],
        dtype=dtype,
        forward_flops=flops,
        backward_flops=2 * flops,
        compute=_compute,
    )


def _compute(local: LocalOperands) -> Tensor:
    """Return the local output; the bias comes after the reduction, or every rank would add it."""
    tensors = local.tensors
    bias = tensors.get("bias")
    if local.finish is None:
        return F.linear(tensors["input"], tensors["weight"], bias)
    product = local.finish(F.linear(tensors["input"], tensors["weight"]))
    return product if bias is None else product + bias


def _type_of(tensor: Tensor | None) -> OperandType:
    return "param" if isinstance(tensor, nn.Parameter) else "arg"


def _check_features(input_shape: Sequence[int], weight: Tensor) -> None:
    if not input_shape or weight.dim() != 2 or input_shape[-1] != weight.shape[1]:  # noqa: PLR2004 (a matrix)
        raise StrategyError(
            "input_shape",
            f"must end in the columns of weight {tuple(weight.shape)}, got {tuple(input_shape)}",
        )
