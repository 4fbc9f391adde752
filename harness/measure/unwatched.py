"""Undoing the one thing that watching changes: some backward formulas avoid in-place operators under a dispatch mode.

torch takes an active dispatch mode for a tensor subclass (`isTensorSubclassLike`) and then fills a fresh tensor of
zeros out of place, which costs another copy of it. Left alone it fills it in place, and so it does here: the operators
and allocations of a watched step are those of an unwatched one.

Source: torch/csrc/autograd/FunctionsManual.cpp, `index_backward`, `gather_backward`,
`value_selecting_reduction_backward`; aten/src/ATen/native/TensorAdvancedIndexing.cpp, `index_select_backward_symint`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.measure.locator import running_node
from harness.measure.tensors import must_unwrap

_aten = torch.ops.aten


def _put(zeros: Tensor, indices: Any, values: Tensor, accumulate: bool) -> Any:
    return _aten._index_put_impl_.default(zeros, indices, values, accumulate, True)


_SELECTIONS = ("Kthvalue", "Max", "Median", "Min", "Mode", "Nanmedian", "Sort", "Topk")

# autograd node and the operator it runs under a mode -> what it runs without
_IN_PLACE: Mapping[tuple[str, Any], Callable[..., Any]] = MappingProxyType(
    {
        ("IndexSelectBackward0", _aten.index_add.default): _aten.index_add_.default,
        ("IndexBackward0", _aten.index_put.default): _put,
        ("GatherBackward0", _aten.scatter_add.default): _aten.scatter_add_.default,
        **{
            (f"{name}Backward{overload}", _aten.scatter.src): _aten.scatter_.src
            for name in _SELECTIONS
            for overload in (0, 1)
        },
    }
)


class AsUnwatched(TorchDispatchMode):
    """Runs every operator as it would run without any mode; enter it last, so that the other modes see the result."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`, or what stands for it outside of dispatch modes."""
        if must_unwrap(types):
            return NotImplemented
        node = running_node()
        run = func if node is None else _IN_PLACE.get((node.name(), func), func)
        return run(*args, **(kwargs or {}))
