"""Forms in which a graph writes an operator down: what it writes to, draws, or depends on.

In-place operators on a tensor that only its writer knows have functional forms, and what needs only the shape
of a tensor has a form that does not take the tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from strategies.estimate.liveness import Key, key_of
from strategies.estimate.operator_cost import is_view

_aten = torch.ops.aten
_FILLS = {
    _aten.zeros_like.default: 0,
    _aten.new_zeros.default: 0,
    _aten.ones_like.default: 1,
    _aten.new_ones.default: 1,
}
CREATES_EMPTY = frozenset(
    {_aten.empty_like.default, _aten.new_empty.default, _aten.new_empty_strided.default}
)
_FULL = frozenset({_aten.full_like.default, _aten.new_full.default})
_SQUEEZES = frozenset({_aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims})
_MASKS = frozenset({torch.bool, torch.uint8})


def depends_on_data(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether numbers or the shape of what `func` returns depend on data."""
    if func is _aten.index.Tensor:  # by positions it does not, whatever its tag says
        return any(isinstance(each, Tensor) and each.dtype in _MASKS for each in args[1])
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def storages_written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> set[Key]:
    """Return the storages that `func` writes to."""
    given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | dict(kwargs)  # noqa: SLF001 (no public name)
    writes = [each.name for each in func._schema.arguments if each.alias_info and each.alias_info.is_write]  # noqa: SLF001
    if given.get("training") is True:  # norms of batches do not say that they write
        writes += ["running_mean", "running_var"]
    return {
        key_of(leaf) for name in writes for leaf in tree_leaves(given.get(name)) if isinstance(leaf, Tensor)
    }


def positional_defaults(func: Any) -> list[Any]:
    """Return the values that positional arguments of `func` have where they are left out."""
    return [each.default_value for each in func._schema.arguments if not each.kwarg_only]  # noqa: SLF001


def without_shapes_of(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
    """Return `func`, or a factory where it takes a tensor only for its shape.

    A view stands for a squeeze, which would take a dimension away where a chunk has one position.
    """
    if func in _SQUEEZES:
        return _aten.view.default, (args[0], list(result.shape)), {}
    if func not in _FILLS and func not in CREATES_EMPTY and func not in _FULL:
        return func, args, kwargs
    options = {"dtype": result.dtype, "device": result.device}
    if not result.is_contiguous():
        shape, strides = list(result.shape), list(result.stride())
        return _aten.empty_strided.default, (shape, strides), options
    if func in CREATES_EMPTY:
        return _aten.empty.memory_format, (list(result.shape),), options
    value = _FILLS[func] if func in _FILLS else args[2 if func is _aten.new_full.default else 1]
    return _aten.full.default, (list(result.shape), value), options


def is_alone(tensor: Tensor, node: fx.Node) -> bool:
    """Return whether `tensor`, which `node` made, lies on memory of its own and has no view."""
    storage = tensor.untyped_storage()._cdata  # noqa: SLF001 (its identity)

    def shares(value: Any) -> bool:
        return isinstance(value, Tensor) and value.untyped_storage()._cdata == storage  # noqa: SLF001

    maker = node.args[0] if node.target is operator.getitem else node
    assert isinstance(maker, fx.Node)
    others = (*maker.all_input_nodes, *node.users)
    return not is_view(maker) and not any(shares(other.meta.get("val")) for other in others)


def put_on_new_memory(tensor: Tensor, node: fx.Node) -> None:
    """Leave the memory of `tensor` to `node`, which made it: the functional form of a write makes its own."""
    history = {"grad_fn": tensor.grad_fn, "requires_grad": tensor.requires_grad}
    node.meta |= history
    node.meta["val"] = _aten.detach.default(tensor)
    if node.target is operator.getitem:
        maker, index = node.args
        maker.meta |= history  # type: ignore[union-attr]
        parts = list(maker.meta["val"])  # type: ignore[union-attr]
        parts[index] = node.meta["val"]  # type: ignore[call-overload, index]
        maker.meta["val"] = tuple(parts)  # type: ignore[union-attr]
    with torch.no_grad():
        tensor.data = torch.empty_like(tensor)


def has_passes(x: Tensor, *others: Tensor | None) -> bool:
    """Return whether a group norm is recorded in passes: of pictures or sequences, in full precision."""
    dtypes = {x.dtype, *(each.dtype for each in others if each is not None)}
    is_full = dtypes in ({torch.float32}, {torch.float64})
    return is_full and x.dim() > 2 and x.is_contiguous()  # noqa: PLR2004 (behind batch and channels)


def is_impure(node: fx.Node) -> bool:
    """Say if a node is kept though nobody uses its result: it writes, draws numbers, or calls a module."""
    if node.op in {"placeholder", "output", "call_module"}:
        return True
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    return bool(schema.is_mutable) or torch.Tag.nondeterministic_seeded in node.target.tags  # type: ignore[union-attr]
