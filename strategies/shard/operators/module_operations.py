"""Operations read from modules and from the arguments of functions; meta tensors are enough."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from strategies.base import StrategyError
from strategies.shard.candidates.operation import OperandType, Operation
from strategies.shard.operators.convolution_and_embedding import conv2d, embedding
from strategies.shard.operators.matrix_products import linear
from strategies.shard.operators.norms import batch_norm, layer_norm


def module_operation(module: nn.Module, input_shape: Sequence[int]) -> Operation:
    """Describe the operator of an `nn.Linear`, `nn.Conv2d`, `nn.Embedding`, `nn.LayerNorm` or batch norm.

    Operands have the dtype of the weight. A norm need not have one, and is described in single precision: use
    `Operation.typed` for another. A batch norm's counter of batches (`num_batches_tracked`) stays with it.

    Args:
        module: the module, which may be on the meta device.

    Raises:
        StrategyError: the input does not fit the module, or the module has an option that is not described.
    """
    match module:
        case nn.Linear():
            return linear_operation(input_shape, module.weight, module.bias)
        case nn.Conv2d():
            return _conv2d(module, input_shape)
        case nn.Embedding():
            for option in ("max_norm", "scale_grad_by_freq", "sparse"):
                if getattr(module, option):
                    raise StrategyError("module", f"must have no {option}, got {getattr(module, option)}")
            sizes = module.num_embeddings, module.embedding_dim
            return embedding(input_shape, *sizes, padding_idx=module.padding_idx).typed(module.weight.dtype)
        case nn.LayerNorm():
            return layer_norm(
                input_shape,
                module.normalized_shape,
                elementwise_affine=module.elementwise_affine,
                bias=module.bias is not None,
                eps=module.eps,
            )
        case nn.BatchNorm1d() | nn.BatchNorm2d() | nn.BatchNorm3d():
            return _batch_norm(module, input_shape)
    problem = "must be a linear, conv2d, embedding, layer norm or batch norm"
    raise StrategyError("module", f"{problem}, got {type(module).__name__}")


def linear_operation(input_shape: Sequence[int], weight: Tensor, bias: Tensor | None = None) -> Operation:
    """Describe `F.linear(input, weight, bias)`; a tensor that is no parameter is an argument.

    Args:
        weight: the weight; all operands have its dtype.

    Raises:
        StrategyError: the shapes do not multiply.
    """
    if not input_shape or weight.dim() != 2 or input_shape[-1] != weight.shape[1]:  # noqa: PLR2004 (a matrix)
        problem = f"must end in the columns of weight {tuple(weight.shape)}"
        raise StrategyError("input_shape", f"{problem}, got {tuple(input_shape)}")
    types: dict[str, OperandType] = {
        name: "param" if isinstance(tensor, nn.Parameter) else "arg"
        for name, tensor in (("weight", weight), ("bias", bias))
    }
    return linear(input_shape, weight.shape[0], bias=bias is not None).typed(weight.dtype, types=types)


def _conv2d(module: nn.Conv2d, input_shape: Sequence[int]) -> Operation:
    """Return the operation of a convolution that pads with zeros."""
    if isinstance(module.padding, str) or module.padding_mode != "zeros":
        problem = "must pad with a number of zeros"
        raise StrategyError("module", f"{problem}, got {module.padding!r} of {module.padding_mode}")
    return conv2d(
        input_shape,
        tuple(module.weight.shape),
        bias=module.bias is not None,
        stride=module.stride,
        padding=module.padding,
        dilation=module.dilation,
        groups=module.groups,
    ).typed(module.weight.dtype)


def _batch_norm(
    module: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d, input_shape: Sequence[int]
) -> Operation:
    if not module.training:
        raise StrategyError("module", "must be training, got one in evaluation; see elementwise")
    if module.momentum is None:
        raise StrategyError("module", "must have a momentum, got None")
    if tuple(input_shape[1:2]) != (module.num_features,):
        problem = f"must have {module.num_features} channels"
        raise StrategyError("input_shape", f"{problem}, got {tuple(input_shape)}")
    return batch_norm(
        input_shape,
        affine=module.affine,
        track_running_stats=module.running_mean is not None,
        eps=module.eps,
        momentum=module.momentum,
    )
