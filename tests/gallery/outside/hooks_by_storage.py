"""Hooks of saved tensors know a tensor by its storage alone; then by its view, with other strides.

A public report on offload hooks: a matrix and its transpose became one copy. The second pair of hooks gives
the same values back in another layout, which is no mix-up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.gallery.outside._checked import checked

BEFORE = "by storage: a buffer used twice, a lower precision; by view: a buffer used twice, a lower precision"
RIGHT = "by storage: other values come back; by view: the same values with other strides"

_WORDS = {
    "a buffer used twice, a lower precision": "a buffer used twice, a lower precision",
    "what is saved for backward is not what comes back": "other values come back",
    "comes back with other strides": "the same values with other strides",
}


class _Gram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        outputs: Tensor = (h @ h.t()).tanh() @ x
        return outputs


def answer() -> str:
    """Return the two causes."""
    return f"by storage: {_cause(by_view=False)}; by view: {_cause(by_view=True)}"


def _make() -> nn.Module:
    return nn.Sequential(_Gram(), _Gram())


def _cause(*, by_view: bool) -> str:
    inputs = torch.sin(torch.arange(36.0)).view(6, 6)
    said = str(checked(_make, (inputs,), _variant(by_view=by_view)).cause)
    return next((word for part, word in _WORDS.items() if part in said), said)


def _variant(*, by_view: bool) -> Callable[[nn.Module], None]:
    def apply(model: nn.Module) -> None:
        inner = model.forward

        def forward(x: Tensor) -> Any:
            copies: dict[Any, tuple[Tensor, Tensor]] = {}

            def pack(tensor: Tensor) -> Any:
                view = (tensor.shape, tensor.stride(), tensor.storage_offset()) if by_view else ()
                key = tensor.untyped_storage().data_ptr(), tensor.dtype, view
                copies.setdefault(key, (tensor.detach().clone(memory_format=torch.contiguous_format), tensor))
                return key, tensor.shape

            def unpack(packed: Any) -> Tensor:
                key, shape = packed
                return copies[key][0].view(shape)

            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                return inner(x)

        model.forward = forward

    return apply
