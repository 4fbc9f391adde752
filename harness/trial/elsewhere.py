"""Tensors that another stage of a pipeline has: their shape is known, and nothing is computed of them.

The forward of a whole model runs on every stage of it. Embeddings are in the first stage alone, but masks and
positions that all blocks read are made before the blocks, of shapes that embeddings have. So what another
stage has is a tensor without values, and what is computed of one is another one. Nothing of it takes memory,
time or a random number, and what a stage gives shows whether it needs values of another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

_META = torch.device("meta")
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_OF_SHAPES = frozenset({
    torch.empty_like, torch.full_like, torch.ones_like, torch.zeros_like,
    Tensor.new_empty, Tensor.new_full, Tensor.new_ones, Tensor.new_zeros,
})  # fmt: skip
"""Functions whose result has nothing of their operand but its shape, dtype and device."""

_TO_DEVICES = frozenset({Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.type})


class ElsewhereError(RuntimeError):
    """A stage asks for a value that it does not have."""


class Elsewhere(Tensor):
    """A tensor of another stage, or one that follows from it.

    Attributes:
        origin: what it is, or follows from, in words.
    """

    origin: str

    @staticmethod
    def like(tensor: Tensor, origin: str, device: torch.device | None = None) -> Elsewhere:
        """Return one of the shape and dtype of `tensor`, on its device or another."""
        # a class method would be called as a function of torch
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (no public name)
            made: Elsewhere = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]  # noqa: SLF001 (as above)
                Elsewhere,
                tensor.shape,
                strides=tensor.stride(),
                dtype=tensor.dtype,
                device=device or tensor.device,
            )
        made.origin = origin
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return what `func` gives, without values where it gives tensors.

        Raises:
            ElsewhereError: values are read, or written to another tensor.
        """
        named = dict(kwargs or {})
        first = next(leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Elsewhere))
        name = getattr(func, "__name__", str(func))
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (no public name)
            if func in _OF_SHAPES:
                return func(*tree_map_only(Elsewhere, _empty, args), **named)
            if _writes(name, args, named):
                raise ElsewhereError(f"{name} writes what follows from {first.origin}")
            try:
                with _disable_current_modes():
                    made = func(*tree_map(_on_meta(func), args), **tree_map(_on_meta(func), named))
            except (NotImplementedError, RuntimeError) as error:
                raise ElsewhereError(f"{name} needs values of {first.origin}") from error
            if name == "__get__" and not isinstance(made, Tensor):
                return func(*args)  # a property such as its device
            device = first.device
            return tree_map_only(Tensor, lambda each: Elsewhere.like(each, first.origin, device), made)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own declaration is of no class method
        cls, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] = _NOTHING
    ) -> Any:
        """Refuse operators that no function of torch has called."""
        origin = next(leaf.origin for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Elsewhere))
        raise ElsewhereError(f"{func} needs values of {origin}")


def _writes(name: str, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    is_in_place = name in {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"} or (
        name.endswith("_") and not name.endswith("__")
    )
    target = args[0] if is_in_place and args else named.get("out")
    return isinstance(target, Tensor) and not isinstance(target, Elsewhere)


def _empty(tensor: Elsewhere) -> Tensor:
    """Return a tensor with values, of one element that is seen everywhere."""
    return torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def _on_meta(func: Any) -> Any:
    """Return a function that gives the operand without memory, for an operand of `func`."""

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=_META)
        is_device = isinstance(leaf, torch.device) or (isinstance(leaf, str) and func in _TO_DEVICES)
        return _META if is_device else leaf

    return moved
