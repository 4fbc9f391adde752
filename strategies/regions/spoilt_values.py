"""Values of a recomputation that follow from tensors that were written to since forward.

A step between forward and backward may write to what no gradient needs: the weights of another head, a bias
that is added last. So such tensors are followed from operator to operator, and backward is refused where it
uses what they have led to. Where no tensor was written to, nothing of this runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from strategies.estimate.liveness import key_of
from strategies.estimate.patched import LeavesCompiled
from strategies.estimate.tensors import plain_tensors, tensors_in, tensors_written
from strategies.regions.saved_tensors import Packed, hooks_around, memory_of, packed_by, packing
from strategies.regions.versions import modified

_aten = torch.ops.aten
_UNFILLED = frozenset(
    {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
)
"""What makes memory that somebody fills: an operator, or a kernel that no mode sees."""
_ALIASES = frozenset({_aten.detach.default, _aten.alias.default})

_RUNNING = frozenset({"running_mean", "running_var"})


class Past(NamedTuple):
    """A tensor that was written to since forward.

    Fields:
        is_put_back: a recomputation finds it as forward did; whoever keeps it for backward does not.
    """

    tensor: Tensor
    cause: str
    is_put_back: bool = False


class SpoiltValues(LeavesCompiled, TorchDispatchMode):
    """Follows what operators make of tensors that were written to.

    A kernel outside of the dispatcher may have read them, too: whatever it fills counts as made of them, and
    so does all that runs after Python has read a number that follows from them.
    """

    def __init__(self, past: Iterable[Past]) -> None:
        super().__init__()
        self._of: dict[int, tuple[StorageWeakRef, str]] = {}  # by storage
        self._put_back: dict[int, tuple[StorageWeakRef, str]] = {}
        self._unfilled: dict[int, StorageWeakRef] = {}
        self._of_all: str | None = None
        self._any: str | None = None
        self.add(past)

    def add(self, past: Iterable[Past]) -> None:
        """Follow other tensors, too."""
        for each in past:
            if each.is_put_back:
                _note(self._put_back, [each.tensor], each.cause)
            else:
                _note(self._of, [each.tensor], each.cause)
                self._any = self._any or each.cause

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow what runs in the scope, and spoil what autograd saves in it of such values."""
        around = hooks_around()

        def pack(saved: Tensor) -> Packed:
            return packed_by(around, self.given(saved))

        with self, packing(pack):
            yield

    def given(self, saved: Tensor) -> Tensor:
        """Return what backward gets of a saved tensor: itself, or what refuses to be used."""
        cause = (
            None if isinstance(saved, Spoilt) else self._cause_of([saved]) or _found(self._put_back, saved)
        )
        return saved if cause is None else Spoilt(saved, cause)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, and note what it makes of spoilt values."""
        kwargs = kwargs or {}
        written = list(tensors_written(func, args, kwargs))
        filled = self._unfilled.keys() & {key for key, _ in _storages(written)}
        cause = self._of_all or self._cause_of(_read(func, args, kwargs), filled)
        out = func(*args, **kwargs)
        made = list(tensors_in(out))
        if getattr(func, "overloadpacket", None) in _UNFILLED:
            self._unfilled |= {key: StorageWeakRef(storage) for key, storage in _storages(made)}
        elif cause is None:
            for key in filled:
                del self._unfilled[key]
        else:
            _note(self._of, chain(made, written), cause)
            if any(isinstance(each, bool | int | float | complex) for each in tree_leaves(out)):
                self._of_all = cause
        return out

    def _cause_of(self, tensors: Iterable[Tensor], filled: Collection[int] = ()) -> str | None:
        """Return what spoils one of `tensors`; `filled` are keys of memory that is filled now."""
        for key, _ in _storages(each for each in tensors if not isinstance(each, Spoilt)):
            if key in self._of:
                return self._of[key][1]
            if key in self._unfilled and key not in filled:
                return self._any
        return None


class Spoilt(Tensor):
    """Stands for a saved tensor that is not what it was in forward: whoever uses it, raises.

    Attributes:
        cause: which tensor was written to, in words.
    """

    cause: str

    @staticmethod
    def __new__(cls: type[Self], saved: Tensor, cause: str) -> Self:
        """Return it, without memory. Raises RuntimeError: a tensor like `saved` has to have some."""
        if saved.layout is not torch.strided or saved.is_nested:
            raise modified(cause)
        made = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 (no public name)
            cls, saved.size(), saved.stride(), dtype=saved.dtype, device=saved.device
        )
        made.cause = cause
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # (torch declares it as it is called)
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return it under another name. Raises RuntimeError: an operator needs its memory."""
        spoilt = next(each for each in tensors_in((args, kwargs or {})) if isinstance(each, Spoilt))
        if func in _ALIASES:
            return Spoilt(spoilt, spoilt.cause)
        raise modified(spoilt.cause)


def _read(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operator reads: in training, a batch norm but writes to its statistics."""
    schema = getattr(func, "_schema", None)  # higher-order operators have none
    names = [] if schema is None else [each.name for each in schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if not given.keys() >= _RUNNING or not given.get("training", given.get("train", True)):
        return tensors_in((args, kwargs))
    return tensors_in([value for name, value in given.items() if name not in _RUNNING])


def _note(causes: dict[int, tuple[StorageWeakRef, str]], tensors: Iterable[Tensor], cause: str) -> None:
    for key, storage in _storages(tensors):
        causes.setdefault(key, (StorageWeakRef(storage), cause))  # so that no other gets its address


def _found(causes: Mapping[int, tuple[StorageWeakRef, str]], tensor: Tensor) -> str | None:
    return next((causes[key][1] for key, _ in _storages([tensor]) if key in causes), None)


def _storages(tensors: Iterable[Tensor]) -> Iterator[tuple[int, Any]]:
    """Yield keys and storages of `tensors`, of wrappers those of their parts."""
    for tensor in tensors:
        memory = memory_of(tensor)
        for part in plain_tensors([tensor]) if memory is None else [memory]:
            if part.layout is torch.strided and not part.is_nested:
                yield key_of(part), part.untyped_storage()
