"""Results of operators on fake tensors, remembered: torch's kernels and its own cache take much longer.

Shapes, strides, dtypes and the storages that results lie on follow from those of the operands, from the other
arguments, and from a few settings. So equal calls have equal results.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from strategies.estimate.liveness import key_of

_MOST = 100_000
"""Calls that are remembered; then all are forgotten."""

_PLAIN = frozenset(
    {int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_NAMESPACES = frozenset({"aten", "prims"})
_UNTOLD = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view})
"""Tags of operators whose results follow from values, or that give an operand another shape."""


class FakeCall(NamedTuple):
    """A call of an operator on fake tensors.

    Fields:
        key: what results follow from.
    """

    key: Hashable
    tensors: Sequence[FakeTensor]

    @classmethod
    def of(
        cls, mode: FakeTensorMode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> FakeCall | None:
        """Return a call in a mode; `None` where its results may follow from more than a key says."""
        is_mutable = _is_mutable(func)
        if is_mutable is None:
            return None
        tensors: list[FakeTensor] = []
        said: list[Any] = [
            func,
            torch.get_default_dtype(),
            torch._C._get_default_device(),  # noqa: SLF001 (as torch's cache asks)
            torch.is_inference_mode_enabled(),
            torch.is_grad_enabled(),
            *kwargs,
        ]
        if not all(_say(value, mode, said, tensors) for value in (*args, *kwargs.values())):
            return None
        if is_mutable and len(set(map(key_of, tensors))) < len(tensors):
            return None  # torch refuses some that overlap
        return cls(tuple(said), tensors)

    def note(self, result: Any) -> None:
        """Remember what the call has returned."""
        if len(_KNOWN) >= _MOST:
            _KNOWN.clear()
        _KNOWN[self.key] = _told(result, self.tensors)

    def known(self) -> _Results | None:
        """Return what an equal call has returned; `None` where there was none, or it cannot be made again."""
        return _KNOWN.get(self.key)


class FakeResult(NamedTuple):
    """A tensor that a call returns.

    Fields:
        same: number of the operand that it is; `None` of another tensor.
        beside: number of the operand on whose storage it lies; `None` of a new storage.
        attributes: those that torch gives it, but for its mode; none where it is to give them itself.
    """

    same: int | None = None
    beside: int | None = None
    shape: Sequence[int] = ()
    strides: Sequence[int] = ()
    offset: Any = 0
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    attributes: Mapping[str, Any] = MappingProxyType({})

    @property
    def is_new(self) -> bool:
        """Say whether it lies on a storage of its own."""
        return self.same is None and self.beside is None

    def made(self, mode: FakeTensorMode, tensors: Sequence[FakeTensor]) -> FakeTensor:
        """Return the tensor of a call with such operands."""
        if self.same is not None:
            return tensors[self.same]
        with torch._C._DisableTorchDispatch():  # noqa: SLF001 (as torch's cache does)
            empty = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")
            if self.beside is not None:
                storage = tensors[self.beside].untyped_storage()
                empty.set_(storage, self.offset, self.shape, self.strides)
        return self._fake(mode, empty)

    def _fake(self, mode: FakeTensorMode, empty: Tensor) -> FakeTensor:
        """Return what torch makes of a tensor without memory, which takes most of the time of an operator."""
        if not self.attributes:
            return FakeTensor(mode, empty, self.device)
        fake: FakeTensor = Tensor._make_subclass(  # type: ignore[attr-defined]  # noqa: SLF001 (as `FakeTensor.__new__`)
            FakeTensor, empty, False, dispatch_device=True, device_for_backend_keys=self.device
        )
        is_allowed = mode._allow_unsafe_data_ptr_access  # noqa: SLF001 (as above)
        name = "_set_warn_deprecated_on" if is_allowed else "_set_throw_on"
        getattr(torch._C, f"{name}_mutable_data_ptr")(fake)  # noqa: SLF001 (as above)
        vars(fake).update(self.attributes, fake_mode=mode)
        return fake


class _Results(NamedTuple):
    """The results of a call: a tensor or none alone, or several in a list or a tuple."""

    kind: type[Any] | None
    each: Sequence[FakeResult | None]

    def made(self, mode: FakeTensorMode, tensors: Sequence[FakeTensor]) -> Any:
        """Return what the call returns with such operands."""
        made = [None if each is None else each.made(mode, tensors) for each in self.each]
        return made[0] if self.kind is None else self.kind(made)


_KNOWN: dict[Hashable, _Results | None] = {}
"""Of all modes of a process, as torch's own cache."""


@cache
def _is_mutable(func: Any) -> bool | None:
    """Return whether an operator writes to operands; `None` of one of which no results are remembered."""
    if not isinstance(func, OpOverload) or func.namespace not in _NAMESPACES:
        return None
    if _UNTOLD.intersection(func.tags):
        return None
    if func.name().startswith("aten::lift"):  # what they are given may have no mode
        return None
    return bool(func._schema.is_mutable)  # noqa: SLF001 (no public name)


def _say(value: Any, mode: FakeTensorMode, said: list[Any], tensors: list[FakeTensor]) -> bool:
    """Add to a key what an argument says, and its tensors; return false where that is not all."""
    kind = type(value)
    if kind is FakeTensor:
        if value.fake_mode is not mode or value.constant is not None or not _is_plain(value):
            return False
        tensors.append(value)
        said.append(_told_of(value))
        return True
    if kind in _PLAIN:
        said.append(kind)  # 1 is equal to 1.0 and to True
        said.append(value)
        return True
    if not isinstance(value, list | tuple):
        return False
    said.append(len(value))
    return all(_say(each, mode, said, tensors) for each in value)


def _is_plain(tensor: FakeTensor) -> bool:
    return tensor.layout is torch.strided and not tensor._has_symbolic_sizes_strides  # noqa: SLF001 (no public name)


def _told_of(tensor: FakeTensor) -> tuple[Hashable, ...]:
    """Return what results follow from of an operand."""
    return (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.storage_offset(),
        tensor.untyped_storage().nbytes(),
        tensor.requires_grad,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.is_inference(),
    )


def _told(result: Any, tensors: Sequence[FakeTensor]) -> _Results | None:
    """Return how to make a result again; `None` where it would not be the same."""
    kind = list if isinstance(result, list) else tuple if isinstance(result, tuple) else None
    each = [result] if kind is None else result
    found = [None if one is None else _result_of(one, tensors) for one in each]
    is_all = all(one is None or told is not None for one, told in zip(each, found, strict=True))
    storages = [key_of(one) for one, told in zip(each, found, strict=True) if told and told.is_new]
    return _Results(kind, found) if is_all and len(set(storages)) == len(storages) else None


def _result_of(result: Any, tensors: Sequence[FakeTensor]) -> FakeResult | None:
    if type(result) is not FakeTensor or result.constant is not None or not _is_plain(result):
        return None
    same = [number for number, each in enumerate(tensors) if each is result]
    beside = [number for number, each in enumerate(tensors) if key_of(each) == key_of(result)]
    if same or len(beside) > 1:
        return FakeResult(same=same[0]) if len(same) == len(beside) == 1 else None
    known = FakeResult(
        beside=beside[0] if beside else None,
        shape=result.shape,
        strides=result.stride(),
        offset=result.storage_offset(),
        dtype=result.dtype,
        device=result.device,
    )
    again = known.made(result.fake_mode, tensors)
    attributes = {name: value for name, value in vars(again).items() if name != "fake_mode"}
    known = known._replace(attributes=attributes)
    again = known.made(result.fake_mode, tensors)
    is_same = _told_of(again) == _told_of(result) and _keys(again) == _keys(result)
    return known if is_same and vars(again) == vars(result) else None


def _keys(tensor: Tensor) -> Any:
    return torch._C._dispatch_key_set(tensor)  # noqa: SLF001 (as torch's cache asks)
