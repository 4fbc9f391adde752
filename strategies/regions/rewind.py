"""State beside tensors that flow: put back for a recomputation, and restored after it.

A checkpointed region runs its forward a second time. What that forward reads beside its inputs may have
changed since: a counter, running statistics, a cache, a router's bias, Python's and NumPy's generators. Torch
puts back its own generators and autocast alone.

Put back here: attributes and buffers of the region's modules, with what lists, dictionaries, sets and plain
objects among them hold; generators among them; the generators of Python and NumPy; context variables. Not put
back: globals, closures, attributes of classes and functions, files and sockets.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType, ModuleType, TracebackType
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.fsdp import FlatParameter

from strategies.regions.blocks import plain_class
from strategies.regions.versions import Version, version_of

SMALL_BYTES = 2**16
"""Tensors of at most so many bytes are copied whether they change or not."""

_NOT_READ = frozenset(vars(nn.Module())) - {"training"} | {"_acbench_region", "_compiled_call_impl"}
_OPAQUE = (nn.Module, type, FunctionType, MethodType, ModuleType)
_DEPTH = 4  # a configuration inside a list inside an attribute

_Contexts: TypeAlias = "tuple[AbstractContextManager[Any], AbstractContextManager[Any]]"
Place: TypeAlias = "tuple[int, str]"
"""A tensor among a region's state: number of its module, and path of attributes and keys in it."""


class Kept(Protocol):
    """A value as it was."""

    def restored(self) -> Any:
        """Return the value that was there, with the content that it had."""


@dataclass(frozen=True, slots=True)
class _Constant:
    """What nobody changes in place, or nobody may look into."""

    value: Any

    def restored(self) -> Any:
        return self.value


@dataclass(frozen=True, slots=True)
class _Copied:
    """A tensor and a copy of its values."""

    tensor: Tensor
    copy: Tensor

    def restored(self) -> Tensor:
        # a write that autograd does not see: what it saved of the tensor has its value again when it is read
        with torch.no_grad(), _unsafe_preserve_version_counter((self.tensor,)):
            self.tensor.copy_(self.copy)
        return self.tensor


@dataclass(frozen=True, slots=True)
class _Watched:
    """A large tensor that no step has changed so far."""

    tensor: Tensor
    version: Version
    place: str

    def restored(self) -> Tensor:
        if self.version.is_past():
            problem = f"{self.place!r} of {list(self.tensor.shape)} changed in place after its region began"
            raise RuntimeError(
                f"ac.rewind: {problem}, for the first time, and no copy of it was made; it is copied from "
                "the next forward on"
            )
        return self.tensor


@dataclass(frozen=True, slots=True)
class _Array:
    array: np.ndarray[Any, Any]
    copy: np.ndarray[Any, Any]

    def restored(self) -> np.ndarray[Any, Any]:
        np.copyto(self.array, self.copy)
        return self.array


@dataclass(frozen=True, slots=True)
class _Through:
    """A value whose content `write` puts back."""

    value: Any
    write: Callable[[], object]

    def restored(self) -> Any:
        self.write()
        return self.value


@dataclass(frozen=True, slots=True)
class _Items:
    """A list, deque or tuple, and what it held."""

    value: Any
    items: list[Kept]

    def restored(self) -> Any:
        items = [item.restored() for item in self.items]
        if isinstance(self.value, list):
            self.value[:] = items
        elif isinstance(self.value, deque):
            self.value.clear()
            self.value.extend(items)
        return self.value


@dataclass(frozen=True, slots=True)
class _Entries:
    """A dictionary, or the attributes of an object, and what was in it."""

    value: Any
    entries: MutableMapping[Any, Any]
    kept: dict[Any, Kept]

    def restored(self) -> Any:
        restored = {key: each.restored() for key, each in self.kept.items()}
        if list(self.entries) != list(restored):
            self.entries.clear()
        self.entries.update(restored)
        return self.value


@dataclass(kw_only=True, slots=True)
class Rewind:
    """The state of one region, kept at each forward and put back for its recomputation.

    A tensor of more than `SMALL_BYTES` is copied in the first step, and later only where a step has changed
    it: between the begin of the region's forward and its end, or its recomputation.

    Fields:
        changing: tensors that a step has changed.
        is_learned: a step has been watched to its recomputation.
    """

    changing: set[Place] = field(default_factory=set)
    is_learned: bool = False

    def call(self, module: nn.Module) -> RewoundCall:
        """Return one call of the region around `module`: how its forward and its recomputations run."""
        return RewoundCall(self, module)


class RewoundCall:
    """One call of a region: its forward notes the state, each recomputation finds it again.

    Args:
        rewind: what the region has learned.
        module: the module that the region stands around.
    """

    def __init__(self, rewind: Rewind, module: nn.Module) -> None:
        self._rewind = rewind
        self._module = module
        self._context = copy_context()
        self._then: _State | None = None

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Note the state that the forward inside of the block finds."""
        self._then = _State.of(self._module, self._rewind)
        yield
        self._then.note_changes(self._rewind)

    @contextmanager
    def recomputation(self) -> Iterator[None]:
        """Put the noted state back for the block, and what is there now after it.

        Raises:
            RuntimeError: a large tensor changed that never did before.
        """
        assert self._then is not None
        self._then.note_changes(self._rewind)
        self._rewind.is_learned = True
        now = _State.of(self._module, self._rewind)
        self._then.put()
        try:
            yield
        finally:
            now.put()

    def contexts(self, inner: Callable[[], _Contexts]) -> _Contexts:
        """Return the contexts of forward and of recomputation; those of `inner` lie inside of them."""
        forward, recompute = inner()
        return _Around(self.forward, forward), _Around(self.recomputation, recompute)

    def body(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """Return `body` that finds the context variables of its first call in every other one."""
        is_first = True

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_first
            if is_first:
                is_first = False
                return body(*args, **kwargs)
            return self._context.copy().run(partial(body, *args, **kwargs))

        return run

    def whole(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """Return `body` with both contexts of this call, for a checkpoint that takes none."""
        run_body = self.body(body)

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.forward() if self._then is None else self.recomputation():
                return run_body(*args, **kwargs)

        return run


class _Around(AbstractContextManager[None]):
    """A context around another, each time a new one: a graph that is kept is recomputed again."""

    def __init__(
        self, outer: Callable[[], AbstractContextManager[Any]], inner: AbstractContextManager[Any]
    ) -> None:
        self._outer = outer
        self._inner = inner
        self._entered = ExitStack()

    def __enter__(self) -> None:
        self._entered.enter_context(self._outer())
        self._entered.enter_context(self._inner)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.__exit__(kind, error, trace)


@dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    """The state of a region's modules and of the generators at one moment."""

    kept: list[_Entries]
    tensors: dict[Place, _Copied | _Watched]
    python: Any
    numpy: Any

    @classmethod
    @torch.no_grad()
    def of(cls, module: nn.Module, rewind: Rewind) -> _State:
        keeper = _Keeper(rewind)
        kept = [
            each
            for number, part in enumerate(module.modules())
            if not _is_of_units(plain_class(part))
            for each in (
                keeper.entries(vars(part), (number, ""), _own_attributes(part)),
                keeper.entries(part._buffers, (number, "")),  # noqa: SLF001 (with the names that hold None)
            )
        ]
        numpy = np.random.get_state()  # noqa: NPY002 (users')
        return cls(kept=kept, tensors=keeper.tensors, python=random.getstate(), numpy=numpy)

    def put(self) -> None:
        """Make everything what it was.

        Raises:
            RuntimeError: a large tensor has changed, of which there is no copy.
        """
        for each in self.kept:
            each.restored()
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002 (users')

    @torch.no_grad()
    def note_changes(self, rewind: Rewind) -> None:
        """Note which tensors are not what they were."""
        for place, kept in self.tensors.items():
            if place in rewind.changing:
                continue
            if kept.version.is_past() if isinstance(kept, _Watched) else not _equal(kept.tensor, kept.copy):
                rewind.changing.add(place)


class _Keeper:
    """Keeps values, and lists the tensors among them."""

    def __init__(self, rewind: Rewind) -> None:
        self.tensors: dict[Place, _Copied | _Watched] = {}
        self._rewind = rewind

    def entries(
        self, value: MutableMapping[str, Any], place: Place, names: list[str] | None = None
    ) -> _Entries:
        """Keep the entries `names` of `value`; all where they are not given."""
        own = {name: value[name] for name in (value if names is None else names)}
        kept = {name: self.keep(each, _inside(place, name)) for name, each in own.items()}
        return _Entries(value, value if names is None else _Named(value), kept)

    def keep(self, value: Any, place: Place, depth: int = _DEPTH) -> Kept:
        """Keep `value`, and what it holds down to `depth`."""
        if isinstance(value, Tensor):
            return self._tensor(value, place)
        if isinstance(value, np.ndarray):
            return _Array(value, value.copy())
        if (generator := _generator(value)) is not None:
            return generator
        if depth == 0 or isinstance(value, _OPAQUE) or _is_of_units(type(value)):
            return _Constant(value)
        return self._container(value, place, depth - 1)

    def _tensor(self, tensor: Tensor, place: Place) -> Kept:
        is_small = tensor.numel() * tensor.element_size() <= SMALL_BYTES
        kept: _Copied | _Watched
        if tensor.is_meta or tensor.layout != torch.strided:
            return _Constant(tensor)
        if is_small or place in self._rewind.changing or not self._rewind.is_learned:
            kept = _Copied(tensor, tensor.detach().clone())
        else:
            kept = _Watched(tensor, version_of(tensor), place[1])
        self.tensors[place] = kept
        return kept

    def _container(self, value: Any, place: Place, depth: int) -> Kept:
        def keep(each: Any, key: object) -> Kept:
            return self.keep(each, _inside(place, key), depth)

        if isinstance(value, list | tuple | deque):
            return _Items(value, [keep(each, index) for index, each in enumerate(value)])
        if isinstance(value, MutableMapping):
            return _Entries(value, value, {key: keep(each, key) for key, each in value.items()})
        if isinstance(value, set):
            return _Through(value, partial(_refill, value, set(value)))
        if hasattr(value, "__dict__") and not callable(value):
            own = vars(value)
            return _Entries(value, own, {name: keep(each, name) for name, each in own.items()})
        return _Constant(value)


class _Named(MutableMapping[str, Any]):
    """A module's own attributes, without torch's and without weights that FSDP1 lends for a call."""

    def __init__(self, attributes: MutableMapping[str, Any]) -> None:
        self._attributes = attributes

    def __getitem__(self, name: str) -> Any:
        return self._attributes[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._attributes[name] = value

    def __delitem__(self, name: str) -> None:
        del self._attributes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(
            [
                name
                for name, value in self._attributes.items()
                if name not in _NOT_READ and not _is_lent(value)
            ]
        )

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def clear(self) -> None:
        for name in self:
            del self._attributes[name]


def _is_of_units(cls: type[Any]) -> bool:
    """Whether a class is FSDP's or DDP's own, whose state goes on."""
    return cls.__module__.startswith("torch.distributed.")


def _is_lent(value: Any) -> bool:
    return isinstance(value, Tensor) and isinstance(value._base, FlatParameter)  # noqa: SLF001 (what it is a view of)


def _own_attributes(module: nn.Module) -> list[str]:
    return list(_Named(vars(module)))


def _inside(place: Place, key: object) -> Place:
    number, path = place
    return number, f"{path}.{key}" if path else str(key)


def _generator(value: Any) -> Kept | None:
    """Return how to put back a random number generator; `None` for other values."""
    if isinstance(value, torch.Generator):
        return _Through(value, partial(value.set_state, value.get_state()))
    if isinstance(value, random.Random):
        return _Through(value, partial(value.setstate, value.getstate()))
    if isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        return _Through(value, partial(setattr, bits, "state", bits.state))
    if isinstance(value, np.random.RandomState):
        return _Through(value, partial(value.set_state, value.get_state()))
    return None


def _refill(value: set[Any], items: set[Any]) -> None:
    value.clear()
    value.update(items)


def _equal(tensor: Tensor, copy: Tensor) -> bool:
    """Say whether both have the same values; NaN equals NaN. Of fake tensors nothing is known."""
    if tensor.shape != copy.shape or isinstance(tensor, FakeTensor):
        return False
    return bool(torch.equal(tensor, copy) or torch.allclose(tensor, copy, rtol=0, atol=0, equal_nan=True))
