"""Dynamic classes before a user's: what they do in its place is ours, all else stays the user's.

A dynamic class has module, names, documentation and source of the class that the user wrote: code that
knows models by `str(type(model))` or by `model.__class__.__name__` finds the model that it knows, and the
signature of `model.forward` is the user's. Code that writes to its own class, `type(self).calls += 1`, means
the class that the user wrote. There the factory, plain instances and other dynamic classes find the value.

What cannot be kept: `type(model) is Block` is false, `Block.__subclasses__()` has one more.
"""

from __future__ import annotations

import copyreg
from functools import cache
from types import FunctionType
from typing import Any

from torch import nn

from strategies.regions.blocks import Disguised

_WEARER = "_acbench_wearer"
_OURS = "forward"  # what stands around forward, and meters, replace it on the class that they see
_OF_SOURCE = ("__doc__", "__firstlineno__")  # the second from Python 3.13 on


def disguise(module: nn.Module, mixin: type[Disguised]) -> None:
    """Put `mixin` before the class of `module`, in place."""
    module.__class__ = disguised(mixin, type(module))  # type: ignore[assignment, arg-type]


@cache  # one class per class, so that identical blocks stay identical to compilers and pickles
def disguised(mixin: type[Disguised], original: Any) -> type[nn.Module]:
    """Return a subclass of `mixin` and `original`, whose attributes are those of `original`, to write too."""
    metaclass: Any = type(original)
    namespace = {
        **{name: vars(original)[name] for name in _OF_SOURCE if name in vars(original)},
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        _WEARER: original,
    }
    if _OURS in vars(mixin):
        namespace[_OURS] = _as_of(original, vars(mixin)[_OURS])
    made: type[nn.Module] = _mask(metaclass)(original.__name__, (mixin, original), namespace)
    return made


def _as_of(original: Any, ours: FunctionType) -> FunctionType:
    """Return `ours` with the signature and the source that the forward of `original` has."""
    made = FunctionType(ours.__code__, ours.__globals__, ours.__name__, ours.__defaults__, ours.__closure__)
    made.__kwdefaults__ = ours.__kwdefaults__
    made.__wrapped__ = original.forward  # type: ignore[attr-defined]
    return made


class _Mask(type):
    """The class of a dynamic class: an attribute that is set on it is set on the user's."""

    def __setattr__(cls, name: str, value: Any) -> None:
        if _is_of_the_user(cls, name):
            setattr(vars(cls)[_WEARER], name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(cls, name: str) -> None:
        if _is_of_the_user(cls, name):
            delattr(vars(cls)[_WEARER], name)
        else:
            super().__delattr__(name)


def _is_of_the_user(cls: type[Any], name: str) -> bool:
    """Say if `name` belongs to the user's class; what others derive from a dynamic class keeps its own."""
    return _WEARER in vars(cls) and name != _OURS and not name.startswith("__")


@cache
def _mask(metaclass: type[Any]) -> type[Any]:
    """Return the class of the dynamic subclasses of what is a `metaclass`."""
    if issubclass(metaclass, _Mask):
        return metaclass
    mask = _Mask if issubclass(_Mask, metaclass) else type("_Mask", (_Mask, metaclass), {})
    copyreg.pickle(mask, _reduced)  # type: ignore[arg-type]  # (a class is else looked up by its name)
    return mask


def _reduced(cls: type[Any]) -> str | tuple[Any, ...]:
    """Return how a dynamic class is made again, or the name of what is derived from one."""
    if _WEARER not in vars(cls):
        return cls.__qualname__
    mixin, original = cls.__bases__
    return disguised, (mixin, original)
