"""A module as its factory made it: its dtypes, and what a cast of them would lose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from harness.errors import ConfigError
from strategies.estimate.tensors import dtype_name

_HELD: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.float32: (torch.float16, torch.bfloat16),
    torch.bfloat16: (torch.float32,),  # the rounding that is asked for
}
"""What each dtype takes from others: exactly, but for that."""

_REDUCED = (torch.float16, torch.bfloat16)
_OWN = "leave dtype out, to train the model as it was made"


def elements_by_dtype(model: nn.Module) -> dict[str, int]:
    """Return the number of parameters' elements by dtype, in the order of the model."""
    found: Counter[str] = Counter()
    for parameter in model.parameters():
        found[dtype_name(parameter.dtype)] += parameter.numel()
    return dict(found)


def main_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of most parameters' elements; float32 where there are none."""
    found: Counter[torch.dtype] = Counter({torch.float32: 0})
    for parameter in model.parameters():
        found[parameter.dtype] += parameter.numel()
    return found.most_common(1)[0][0]


def is_reduced(model: nn.Module) -> bool:
    """Return whether a parameter has less precision than float32."""
    return any(parameter.dtype in _REDUCED for parameter in model.parameters())


def train(model: nn.Module) -> tuple[str, ...]:
    """Call `model.train()` as a training loop does; return in words what that has changed.

    A module may keep parts of itself in evaluation then. A model with parts in evaluation already stays as it
    was made.
    """
    if not all(module.training for module in model.modules()):
        return ()
    model.train()
    kept = [name or "the model" for name, module in model.named_modules() if not module.training]
    return tuple(f"mode of {name}: training -> evaluation, by its own train()" for name in kept)


def require_trainable(model: nn.Module, *, optimizer: str, is_sharded: bool) -> None:
    """Refuse a module that cannot be trained as asked.

    Args:
        model: module on any device.
        optimizer: `adamw` or `sgd`.
        is_sharded: FSDP will shard it.

    Raises:
        ConfigError: a parameter has no shape yet, or a sparse gradient has no use.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            problem = f"parameter {name!r} has no shape before the first forward; make it with its sizes"
            raise ConfigError("model.factory", problem)
    for name, module in model.named_modules():
        is_table = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if is_table and module.sparse and not _has_gradient_hooks(module.weight):
            _require_sparse(name, optimizer, is_sharded=is_sharded)


def cast(model: nn.Module, dtype: torch.dtype, *, asked: str, with_buffers: bool) -> dict[str, int]:
    """Cast floating-point parameters in place; return the number of tensors by what happened to them.

    Complex numbers whose parts are `dtype` already stay. So do integers and truth values among buffers.

    Args:
        model: module on any device.
        dtype: dtype of parameters at rest, float32 or bfloat16.
        asked: how the configuration calls it.

    Raises:
        ConfigError: a tensor cannot be cast without loss; the message names it.
    """
    changed: Counter[str] = Counter()
    for kind, name, tensor in _to_cast(model, with_buffers=with_buffers):
        if _stays(tensor, dtype, asked) or (kind == "buffer" and not _is_number(tensor)):
            continue
        if tensor.dtype not in _HELD[dtype]:
            held = f"{kind} {name!r} is {dtype_name(tensor.dtype)}, which {asked} cannot hold without loss"
            raise ConfigError("dtype", f"{held}; {_OWN}")
        changed[f"{kind}s from {dtype_name(tensor.dtype)} to {dtype_name(dtype)}"] += 1
        tensor.data = tensor.data.to(dtype)
    return dict(changed)


def _has_gradient_hooks(parameter: Tensor) -> bool:
    """Say if the user does something to a gradient before the optimizer sees it, such as making it dense."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None), parameter._backward_hooks  # noqa: SLF001
    return any(hooks)


def _require_sparse(name: str, optimizer: str, *, is_sharded: bool) -> None:
    made = f"{name!r} makes sparse gradients"
    if is_sharded:
        raise ConfigError("mesh.dp_shard", f"{made}, which FSDP cannot reduce; use sparse=False or mesh=ddp2")
    if optimizer == "adamw":
        raise ConfigError("optimizer", f"adamw takes no sparse gradients, and {made}; use optimizer=sgd")


def _to_cast(model: nn.Module, *, with_buffers: bool) -> Iterator[tuple[str, str, Tensor]]:
    yield from (("parameter", name, parameter) for name, parameter in model.named_parameters())
    if with_buffers:
        yield from (("buffer", name, buffer) for name, buffer in model.named_buffers())


def _stays(tensor: Tensor, dtype: torch.dtype, asked: str) -> bool:
    if tensor.is_complex():  # mixed precision would drop the imaginary part
        return asked == "fp32" and tensor.dtype.to_real() is dtype
    return tensor.dtype is dtype


def _is_number(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
