"""Tensors whose values follow from shapes alone, although they are fake: positions, masks, counters.

`transformers` asks such tensors whether a mask is needed at all. A forward that is followed without data has
to get the answer that it gets with data, or it would take another branch: with a mask that the model never
makes, and another attention kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock
from weakref import ref

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from strategies import generators

QUESTIONS = frozenset(
    ["__bool__", "__int__", "__float__", "__index__", "item", "tolist", "equal", "allclose", "is_nonzero"]
)
"""Functions that turn a tensor's values into Python's."""

_FACTORIES = frozenset({"arange", "zeros", "ones", "full", "tensor", "eye", "linspace"})
_LARGEST = 2**20  # elements; a mask of 1,024 tokens
_MODULE = "transformers.utils.import_utils"


class KnownValues(TorchFunctionMode):
    """Computes the values of fake tensors that depend on no input, parameter or random number."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[int, tuple[ref[Tensor], int, Tensor]] = {}  # by `id`; nothing lives longer for it

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function.

        Small tensors made of shapes alone keep their values, which questions may ask for.
        """
        kwargs = kwargs or {}
        if any(isinstance(each, Tensor) and id(each) not in self._values for each in args):
            return func(*args, **kwargs)  # most calls; what follows looks at all operands
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = all(self._value(tensor) is not None for tensor in tensors)
        name = getattr(func, "__name__", "")
        if known and tensors and name in QUESTIONS:
            return self._really(func, args, kwargs)
        result = func(*args, **kwargs)
        if known and (tensors or name in _FACTORIES) and _is_small_and_new(result, tensors):
            self._note(result, self._drawn_from_nothing(func, args, kwargs))
        return result

    def _note(self, result: Tensor, value: Tensor | None) -> None:
        if value is not None:
            gone = partial(self._forget, id(result))
            self._values[id(result)] = ref(result, gone), result._version, value  # noqa: SLF001 (as autograd knows it)

    def _forget(self, key: int, gone: ref[Tensor]) -> None:
        if key in self._values and self._values[key][0] is gone:
            del self._values[key]

    def is_unknown(self, value: Any) -> bool:
        """Return whether `value` is a tensor without data whose values do not follow from shapes."""
        return isinstance(value, FakeTensor) and self._value(value) is None

    def _value(self, tensor: Tensor) -> Tensor | None:
        if id(tensor) not in self._values:
            return None
        fake, version, value = self._values[id(tensor)]
        return value if fake() is tensor and tensor._version == version else None  # noqa: SLF001

    def _really(self, func: Any, args: Any, kwargs: Any) -> Any:
        with _disable_current_modes(), torch.no_grad():
            given, named = tree_map_only(Tensor, self._value, (args, kwargs))
            return func(*given, **named)

    def _drawn_from_nothing(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """Return the value of a call that reads no data; `None` where it draws random numbers."""
        with _disable_current_modes():
            before = [generators.of_device(generators.CPU).now()]
            value = self._really(func, args, kwargs)
            is_random = bool(generators.moved(before))
            generators.put(before)
        return value if isinstance(value, Tensor) and not is_random else None


def _is_small_and_new(result: Any, operands: list[Tensor]) -> bool:
    is_new = isinstance(result, Tensor) and not any(result is operand for operand in operands)
    return is_new and result.numel() <= _LARGEST


@contextmanager
def with_known_values(*, is_traced: bool = False) -> Iterator[None]:
    """Let forwards that are followed take the branches that they take with data.

    `transformers` leaves out its questions, and the shortcuts that depend on the answers, where it sees a
    fake tensor.

    Args:
        is_traced: leave it so for tensors whose values nobody knows: what follows is right for any data.
    """
    known = KnownValues()
    module = sys.modules.get(_MODULE)
    if module is None or not hasattr(module, "is_fake_tensor"):
        with known:
            yield
        return
    is_fake = known.is_unknown if is_traced else _never
    with mock.patch.object(module, "is_fake_tensor", is_fake), known:
        yield


def _never(_: Any) -> bool:
    return False
