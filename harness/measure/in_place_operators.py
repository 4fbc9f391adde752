"""In-place operators of a watched step: under a dispatch mode torch avoids them, and here they come back.

An active mode passes for a tensor subclass (`isTensorSubclassLike`). Some backward formulas then fill a
fresh tensor of zeros out of place, the engine adds two gradients of one tensor out of place, and math
attention adds its mask out of place; each costs another copy. Left alone they work in place, and so they do
here: operators and allocations of a watched step are those of an unwatched one, to the last (tests compare
the allocator's counts).

Source: torch/csrc/autograd/input_buffer.cpp, `accumulate`; torch/csrc/autograd/FunctionsManual.cpp,
`index_backward`, `gather_backward`, `value_selecting_reduction_backward`;
aten/src/ATen/native/TensorAdvancedIndexing.cpp, `index_select_backward_symint`;
aten/src/ATen/native/transformers/attention.cpp, `_scaled_dot_product_attention_math`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import functional
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode,
)

from strategies.estimate.liveness import key_of
from strategies.estimate.patched import Wrappings
from strategies.estimate.tensors import alias_of, plain_tensors_in
from strategies.step.operator_mode import OperatorMode
from strategies.step.position import running_node, sequence_number

_aten = torch.ops.aten


def _put(zeros: Tensor, indices: Any, values: Tensor, accumulate: bool) -> Any:
    return _aten._index_put_impl_.default(zeros, indices, values, accumulate, True)


_COMPILED = "CompiledFunction"  # a node that runs a graph, in which each operator is what it says
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


class AsUnwatched(OperatorMode):
    """Runs every operator as without a dispatch mode; enter it last, so that other modes see the same.

    Args:
        wrappings: to which it adds the function that it wraps.
    """

    def __init__(self, wrappings: Wrappings | None = None) -> None:
        super().__init__()
        self._wrappings = Wrappings() if wrappings is None else wrappings
        self._sole_owner = (0, 0)
        self._node: tuple[str, int] | None = None
        self._made_by_node: set[int] = set()
        self._attends = False

    def __enter__(self) -> Self:
        self._sole_owner = _sole_owner_counts()
        self._wrappings.wrap(functional, "scaled_dot_product_attention", self._attend)
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *exc: object) -> None:
        self._wrappings.close()
        super().__exit__(*exc)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `func`, or what stands for it outside of dispatch modes."""
        if self._attends and func is _aten.add.Tensor:
            # another tensor, for autograd to write the history of the sum on
            return alias_of(_aten.add_.Tensor(*args, **kwargs))
        node = running_node()
        if node is None or torch.is_grad_enabled() or node.name().startswith(_COMPILED):
            return func(*args, **kwargs)
        self._follow(node)
        if func is _aten.add.Tensor and self._is_accumulation(node, args):
            return _accumulated(*args, sole_owner=self._sole_owner)
        result = _IN_PLACE.get((node.name(), func), func)(*args, **kwargs)
        self._made_by_node |= set(map(key_of, plain_tensors_in(result)))
        return result

    def _attend(self, attention: Callable[..., Tensor], /, *args: Any, **kwargs: Any) -> Tensor:
        """Run an attention, whose operators are told apart meanwhile."""
        # under another mode, such as that of a selective region, nobody adds in place, watched or not
        self._attends = _get_current_dispatch_mode() is self
        try:
            return attention(*args, **kwargs)
        finally:
            self._attends = False

    def _follow(self, node: Node) -> None:
        identity = node.name(), sequence_number(node)
        if identity != self._node:
            self._node = identity
            self._made_by_node.clear()

    def _is_accumulation(self, node: Node, operands: tuple[Any, ...]) -> bool:
        """Tell whether the engine adds two gradients of one tensor; not a sum in the node's formula.

        The engine's first operand comes from another node, or this one has two edges to one tensor (x * x).
        """
        first, second = operands
        if not isinstance(second, Tensor):
            return False
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        return key_of(first) not in self._made_by_node or len(set(edges)) < len(edges)


def _accumulated(first: Tensor, second: Tensor, *, sole_owner: tuple[int, int]) -> Tensor:
    """Add as the engine does: into the first gradient where nobody else holds it."""
    in_place = _is_dense(first) and _owner_counts(first) == sole_owner
    total: Tensor = (_aten.add_.Tensor if in_place else _aten.add.Tensor)(first, second)
    return total


def _is_dense(tensor: Tensor) -> bool:
    """Tell whether the elements fill one stretch of memory, each once, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _owner_counts(tensor: Tensor) -> tuple[int, int]:
    """Return how many references hold the tensor and how many its storage, the call's included."""
    storage = tensor.untyped_storage()
    tensor_uses: int = tensor._use_count()  # type: ignore[attr-defined]  # noqa: SLF001 (no public way)
    storage_uses: int = torch._C._storage_Use_Count(storage._cdata)  # noqa: SLF001 (no public way)
    return tensor_uses, storage_uses


def _sole_owner_counts() -> tuple[int, int]:
    """Return the counts of a gradient that only the engine holds, as a mode of this torch sees it."""
    sums = _CountingSums()
    with _disable_current_modes(), sums:
        x = torch.ones(1, requires_grad=True)
        torch.autograd.grad(x.sin() * x.cos(), x)
    return sums.counts


class _CountingSums(OperatorMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts = (0, 0)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _aten.add.Tensor:
            self.counts = _owner_counts(args[0])
        return func(*args, **kwargs)
