"""Forwards followed without data take the branches that they take with data, where these can be known.

torch's encoder layers have a fused path for inference, whose insides no recorder and no meter sees. It is off
while a forward is followed, so that the layers run as in training.

Fake tensors are copied deeply as those with data: copies share the mode, and no storage. torch copies all
attributes of a tensor. Among those of a fake one is its mode, and below it weak references to storages. Their
copies give back references that nobody took: the heap is corrupt, and the process dies later. Factories copy
layers (`nn.TransformerEncoder`), trials copy example inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from strategies.estimate.patched import replaced, wrapped
from strategies.tracing.shape_values import with_known_values


@contextmanager
def as_with_data() -> Iterator[None]:
    """Answer what depends on shapes alone, copy as with data, keep encoder layers off their fused path."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            with_known_values(is_traced=True),
            replaced(FakeTensor, "__deepcopy__", _deep_copied),
            wrapped(torch.nn.init, "_no_grad_trunc_normal_", _truncated),
        ):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _truncated(drawn: Callable[..., Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Leave a tensor without data as it is: torch 2.13 draws until all values lie between the bounds."""
    return tensor if isinstance(tensor, FakeTensor) else drawn(tensor, *args, **kwargs)


def _deep_copied(tensor: FakeTensor, memo: dict[Any, Any]) -> Tensor:
    """Return a deep copy of a fake tensor under the same mode; views of one storage stay views of one.

    Args:
        tensor: what `copy.deepcopy` has met.
        memo: its copies so far, by identity.

    Raises:
        RuntimeError: as with data, of a tensor that is no leaf.
    """
    if id(tensor) in memo:
        found: Tensor = memo[id(tensor)]
        return found
    if getattr(tensor, "_is_param", False):  # which torch copies without what else it holds
        made: Tensor = nn.Parameter(tensor.detach().clone(), requires_grad=tensor.requires_grad)
        memo[id(tensor)] = made
        return made
    mode, constant = tensor.fake_mode, tensor.constant
    memo[id(mode)] = mode
    if constant is not None:
        with _disable_current_modes():
            memo[id(constant)] = constant.clone()
    # torch takes an address of 0 for a sign that there is no storage to copy
    with mode, replaced(FakeTensor, "data_ptr", lambda _: 1):
        copied: Tensor = Tensor.__deepcopy__(tensor, memo)
    if constant is not None and isinstance(copied, FakeTensor):
        mode.fake_tensor_converter.add_constant_storage_mapping(copied)
    return copied
