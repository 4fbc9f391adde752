"""Aliases of the program's tensors that gloo works on, so that references of gloo can be counted."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # torch.utils has no public name for it
from torch.utils._python_dispatch import _disable_current_modes

from strategies.estimate.collectives import collective_name
from strategies.estimate.tensors import alias_of, tensors_in
from strategies.step.operator_mode import OperatorMode


class TensorLender(OperatorMode):
    """Passes aliases of the program's tensors to collectives, and their tensors back; adds no operator.

    Attributes:
        lent: tensors that collectives were given or have made; the program holds no other reference to them.
        storage_holders: how many held the storage of each before the collective began, by its place in
            `lent`; of those that were given.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lent: list[Tensor] = []
        self.storage_holders: dict[int, int] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `func`, on other tensors if it is a collective."""
        if collective_name(func) is None:
            return func(*args, **kwargs)
        lenders: dict[int, Tensor] = {}
        lend = functools.partial(self._lend, lenders)
        begin = len(self.lent)
        args, kwargs = pytree.tree_map_only(Tensor, lend, (args, kwargs))
        for place in range(begin, len(self.lent)):
            self.storage_holders[place] = storage_holders(self.lent[place])
        result = func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, functools.partial(self._take_back, lenders), result)

    def _lend(self, lenders: dict[int, Tensor], tensor: Tensor) -> Tensor:
        """Return another tensor on the same memory for the collective to hold."""
        if not _is_lendable(tensor):
            return tensor
        alias = alias_of(tensor)
        self.lent.append(alias)
        lenders[id(alias)] = tensor
        return alias

    def _take_back(self, lenders: dict[int, Tensor], tensor: Tensor) -> Tensor:
        """Return the program's tensor for one that the collective gives back."""
        if id(tensor) in lenders:
            return lenders[id(tensor)]
        if not _is_lendable(tensor):
            return tensor
        self.lent.append(tensor)  # made by the collective, which goes on to hold it
        return alias_of(tensor)


class TensorFinder(OperatorMode):
    """Finds the tensors that a collective has made for itself and works on while it is waited for.

    Args:
        lent: is extended by what is found.
    """

    def __init__(self, lent: list[Tensor]) -> None:
        super().__init__()
        self._lent = lent

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `func` and note on what."""
        for tensor in tensors_in(args):
            # a view would hold what it is a view of
            if not tensor._is_view() and all(tensor is not known for known in self._lent):  # noqa: SLF001 (no public name)
                self._lent.append(tensor)
        return func(*args, **kwargs)


def holders(lent: list[Tensor]) -> list[tuple[int, int]]:
    """Return for each tensor how many hold it in C++ and how many in Python, the call's included.

    Both matter: a thread drops its last C++ reference first and that to the Python object a moment later.
    """
    return [(int(tensor._use_count()), sys.getrefcount(tensor)) for tensor in lent]  # type: ignore[attr-defined]  # noqa: SLF001 (no public way)


def storage_holders(tensor: Tensor) -> int:
    """Return how many tensors lie on the storage of one, and whoever else holds it."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))  # type: ignore[attr-defined]  # noqa: SLF001 (no public way)


def sole_holder() -> tuple[int, int]:
    """Return what `holders` says in this torch of a tensor that only its list holds."""
    with _disable_current_modes():
        return holders([torch.empty(0)])[0]


def _is_lendable(tensor: Tensor) -> bool:
    """Tell whether the tensor is gloo's to hold: on CPU, dense, and real."""
    is_plain = type(tensor) in (Tensor, nn.Parameter)
    return is_plain and tensor.device.type == "cpu" and tensor.layout is torch.strided
