"""Finding the tensors in a value, and the plain tensors in a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor of nested mappings, sequences and dataclasses, in order of appearance."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


def plain_tensors(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield `tensors` with each wrapper (a DTensor) replaced by the local tensors it wraps."""
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            # a DTensor's parts are its local tensor and its device mesh
            yield from plain_tensors(tensors_in([getattr(tensor, name) for name in names]))
        else:
            yield tensor


def parameters_of(model: nn.Module) -> Iterator[Tensor]:
    """Yield the plain tensors that are the parameters now: FSDP's unsharded ones while it holds them."""
    return plain_tensors(model.parameters())


def gradients_of(model: nn.Module) -> Iterator[Tensor]:
    """Yield the plain tensors of the gradients that the model's parameters hold now."""
    return plain_tensors(p.grad for p in model.parameters() if p.grad is not None)


def optimizer_state_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the plain tensors of the optimizer's state."""
    return plain_tensors(tensors_in(list(optimizer.state.values())))


def alias_of(tensor: Tensor) -> Tensor:
    """Return another tensor on the same storage, made unseen by dispatch modes."""
    with _disable_current_modes():
        alias: Tensor = torch.ops.aten.alias.default(tensor)
    return alias
