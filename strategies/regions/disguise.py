"""Dynamic classes before a user's: what they do in its place is ours, all else stays the user's.

Code that writes to its own class, `type(self).calls += 1`, means the class that the user wrote. There the
factory, plain instances and other dynamic classes find the value.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn

from strategies.regions.blocks import Disguised

_WEARER = "_acbench_wearer"
_OURS = "forward"  # what stands around forward, and meters, replace it on the class that they see


def disguise(module: nn.Module, mixin: type[Disguised], prefix: str = "") -> None:
    """Put `mixin` before the class of `module`, in place."""
    module.__class__ = disguised(mixin, type(module), prefix)  # type: ignore[assignment, arg-type]


@cache  # one class per class, so that identical blocks stay identical to compilers and pickles
def disguised(mixin: type[Disguised], original: Any, prefix: str = "") -> type[nn.Module]:
    """Return a subclass of `mixin` and `original`, whose attributes are those of `original`, to write too.

    Args:
        mixin: what it does otherwise.
        original: class of a module.
        prefix: put before its name.
    """
    metaclass: Any = type(original)
    namespace = {"__module__": original.__module__, _WEARER: original}
    made: type[nn.Module] = _mask(metaclass)(f"{prefix}{original.__name__}", (mixin, original), namespace)
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
    """Whether `name` belongs to the user's class; what others derive from a dynamic class keeps its own."""
    return _WEARER in vars(cls) and name != _OURS and not name.startswith("__")


@cache
def _mask(metaclass: type[Any]) -> type[Any]:
    """Return the class of the dynamic subclasses of what is a `metaclass`."""
    if issubclass(_Mask, metaclass):
        return _Mask
    return metaclass if issubclass(metaclass, _Mask) else type("_Mask", (_Mask, metaclass), {})
