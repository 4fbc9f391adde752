"""State besides tensors that flow: put back for a recomputation, and restored after it.

A checkpointed region runs its forward a second time. What that forward reads besides its inputs may have
changed since: a counter, running statistics, a cache, a router's bias, Python's and NumPy's generators. Torch
puts back its own generators and autocast alone.

Put back here: attributes and buffers of the region's modules, with what lists, dictionaries, sets and plain
objects among them hold; generators among them; the generators of Python and NumPy; context variables. Not put
back: globals, closures, attributes of classes and functions, files and sockets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import is_
from types import BuiltinFunctionType, FunctionType, ModuleType, TracebackType
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.fsdp import FlatParameter

from strategies.base import StrategyError
from strategies.estimate.anatomy import (
    CONSTANTS,
    DEEPEST,
    HoldingKind,
    attributes,
    is_closed,
    kind_of,
    put_attributes,
)
from strategies.estimate.outer_state import OuterState
from strategies.generators import LatestStates, State, of_torch, put
from strategies.regions.blocks import plain_class
from strategies.regions.versions import PLAIN, Version, alias_of_plain, version_of

LEFT = "acbench_not_rewound"
"""Attribute of a module or its class: names of attributes and buffers that it keeps for its recomputation."""

SMALL_BYTES = 2**16
"""Tensors of at most so many bytes are copied whether they change or not."""

LARGEST_ARRAY_BYTES = 2**24
"""Bytes of an array up to which a first call copies it."""

_INTERCEPTED = "_compiled_call_impl"  # set by nested regions while a forward runs
_NOT_READ = frozenset(vars(nn.Module())) - {"training"} | {
    "_acbench_region",
    "_acbench_compiled",
    _INTERCEPTED,
}
_OPAQUE = (nn.Module, type, FunctionType, ModuleType)
_CONSTANT = frozenset({*CONSTANTS, FunctionType, BuiltinFunctionType, type, torch.Size, nn.Parameter})
"""Types of values that nobody changes in place, or that are none of a module's state."""

_WORDS = {torch.float64: torch.int64, torch.float32: torch.int32} | dict.fromkeys(
    (torch.float16, torch.bfloat16), torch.int16
)
_FOREIGN = ("torch.distributed.", "torch._", "strategies.")
_WITHOUT_ATTRIBUTES = frozenset({list, tuple, dict, set, frozenset, deque, np.ndarray})

Contexts: TypeAlias = "tuple[AbstractContextManager[Any], AbstractContextManager[Any]]"
Place: TypeAlias = "tuple[int, str]"
"""A tensor among a region's state: number of its module, and path of attributes and keys in it."""


class Kept(Protocol):
    """Something of a region's state, as it was."""

    def is_current(self) -> bool:
        """Say whether it is known to be what it was."""

    def put(self) -> None:
        """Make it what it was."""


@dataclass(frozen=True, slots=True)
class _Copied:
    """A tensor and a copy of its values.

    Fields:
        tensor: it, which code may give other memory, or another size.
        memory: another tensor on the memory that it had.
        place: where it is, for messages.
    """

    tensor: Tensor
    copy: Tensor
    memory: Tensor
    place: str

    @classmethod
    def of(cls, tensor: Tensor, place: str) -> _Copied:
        memory = alias_of_plain(tensor) if type(tensor) in PLAIN else tensor.detach()
        return cls(tensor, tensor.detach().clone(), memory, place)

    def is_current(self) -> bool:
        return self.tensor.device.type == "cpu" and _equal(self.tensor, self.copy)  # others would wait

    def put(self) -> None:
        """Raise where a tensor of a type of its own has another size."""
        if self.tensor.shape != self.memory.shape:
            if type(self.tensor) not in PLAIN:
                sizes = f"{list(self.memory.shape)} in forward and is of {list(self.tensor.shape)} now"
                problem = f"{self.place!r}, a {type(self.tensor).__name__}, was of {sizes}"
                raise RuntimeError(f"ac.rewind: {problem}; assign a new tensor instead of another size")
            self.tensor.data = self.memory
        # a write that autograd does not see: what it saved of the tensor has its value again when it is read
        with torch.no_grad(), _unsafe_preserve_version_counter((self.tensor,)):
            self.tensor.copy_(self.copy)

    def has_changed(self) -> bool:
        return not _equal(self.tensor, self.copy)


@dataclass(frozen=True, slots=True)
class _Watched:
    """A large tensor that no step has changed so far."""

    tensor: Tensor
    version: Version
    address: tuple[int, torch.Size]
    place: str

    @classmethod
    def of(cls, tensor: Tensor, place: str) -> _Watched:
        return cls(tensor, version_of(tensor), _address(tensor), place)

    def is_current(self) -> bool:
        return not self.has_changed()

    def put(self) -> None:
        """Raise where the tensor has changed: there is no copy to put back."""
        if self.has_changed():
            problem = f"{self.place!r} of {list(self.tensor.shape)} changed in place after its region began"
            raise RuntimeError(
                f"ac.rewind: {problem}, for the first time, and no copy of it was made; it is copied from "
                "the next forward on"
            )

    def has_changed(self) -> bool:
        return self.version.is_past() or _address(self.tensor) != self.address


@dataclass(frozen=True, slots=True)
class _Content:
    """The content of a container, an array or a generator."""

    value: Any
    kind: HoldingKind
    write: Callable[[Any, Any], object]
    content: Any

    def is_current(self) -> bool:
        return self.kind.is_current(self.value, self.content)

    def put(self) -> None:
        self.write(self.value, self.content)


@dataclass(frozen=True, slots=True)
class _OfObject:
    """The attributes of an object that is no module."""

    value: Any
    values: dict[str, Any]

    def is_current(self) -> bool:
        return _are_same(attributes(self.value), self.values)

    def put(self) -> None:
        put_attributes(self.value, self.values)


@dataclass(frozen=True, slots=True)
class _Attributes:
    """A module's attributes; torch's, and weights that FSDP1 lends for a call, are left alone."""

    entries: dict[str, Any]
    values: dict[str, Any]
    left: frozenset[str]

    @classmethod
    def of(cls, module: nn.Module, left: frozenset[str]) -> _Attributes:
        attributes = vars(module)
        return cls(attributes, _not_intercepted(attributes.copy()), left)

    def is_current(self) -> bool:
        now = self.entries
        if _INTERCEPTED in now:
            now = _not_intercepted(dict(now))
        return _are_same(now, self.values)

    def put(self) -> None:
        names, own = _own(self.entries, self.left), _own(self.values, self.left)
        if list(names) != list(own):
            for name in names:
                del self.entries[name]
        self.entries.update(own)


@dataclass(frozen=True, slots=True)
class _Children:
    """The modules in a module: they are no state, but others hold other state."""

    entries: Mapping[str, Any]
    values: Mapping[str, Any]

    def is_current(self) -> bool:
        return _are_same(self.entries, self.values)

    def put(self) -> None:
        pass


@dataclass(kw_only=True, slots=True)
class Rewind:
    """The state of one region, kept at each forward and put back for its recomputation.

    A tensor of more than `SMALL_BYTES` is copied in the first step, and later only where a step has changed
    it: between the begin of the region's forward and its end, or its recomputation.

    Fields:
        generators: reads Python's and NumPy's generators, for many regions.
        changing: large tensors that a step has changed.
        is_learned: a step has been watched to its recomputation.
    """

    generators: LatestStates = field(default_factory=LatestStates)
    changing: set[Place] = field(default_factory=set)
    is_learned: bool = False

    def call(self, module: nn.Module) -> RewoundCall:
        """Return one call of the region around `module`: how its forward and its recomputations run."""
        return RewoundCall(self, module)


class RewoundCall:
    """One call of a region: its forward notes the state, each recomputation finds it again.

    Args:
        module: the module that the region stands around.
    """

    def __init__(self, rewind: Rewind, module: nn.Module) -> None:
        self._rewind = rewind
        self._module = module
        self._context = copy_context()
        self._then: _State | None = None

    def begin(self) -> None:
        """Note the state that a forward finds."""
        self._then = _State.of(self._module, self._rewind)

    def end(self) -> None:
        """Note what that forward has changed."""
        assert self._then is not None
        self._then.note_changes(self._rewind)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Note what the forward inside of the block finds and changes."""
        self.begin()
        yield
        self.end()

    @contextmanager
    def recomputation(self) -> Iterator[None]:
        """Put the noted state back for the block, and what is there now after it.

        Raises:
            RuntimeError: a large tensor changed that never did before.
            StrategyError: the block raises with the state that forward found.
        """
        then = self._then
        assert then is not None
        then.note_changes(self._rewind)
        self._rewind.is_learned = True
        now = then if then.is_current() else _State.of(self._module, self._rewind)
        if now is not then:
            then.put()
        try:
            yield
        except (LookupError, AttributeError, TypeError, ArithmeticError) as error:
            if now is then:
                raise
            name = plain_class(self._module).__name__
            problem = f"the recomputation of a {name} raises {type(error).__name__} ({error})"
            raise StrategyError(
                "ac.rewind",
                f"{problem}, and its forward did not; it finds the state that forward found: a module that "
                f"keeps something for its recomputation has to name it, {LEFT} = ('splits',)",
            ) from error
        finally:
            now.put()

    def contexts(self, inner: Callable[[], Contexts]) -> Contexts:
        """Return the contexts of forward and of recomputation; those of `inner` lie inside of them."""
        forward, recompute = inner()
        return EachTimeAround(self.forward, forward), EachTimeAround(self.recomputation, recompute)

    def body(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """Return `body` that finds the context variables of its first call in every other one."""
        is_first = True

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_first
            if is_first:
                is_first = False
                return body(*args, **kwargs)
            return self.again(body, *args, **kwargs)

        return run

    def again(self, body: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return `body(*args, **kwargs)`, with the context variables of the first call."""
        return self._context.copy().run(partial(body, *args, **kwargs))

    def whole(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """Return `body` with both contexts of this call, for a checkpoint that takes none."""
        run_body = self.body(body)

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.forward() if self._then is None else self.recomputation():
                return run_body(*args, **kwargs)

        return run


class EachTimeAround(AbstractContextManager[None]):
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


@contextmanager
def python_state_kept(model: nn.Module, blocks: Iterable[nn.Module], *, remedy: str) -> Iterator[None]:
    """Put back what a copy of `model` without memory may change: what both hold besides tensors.

    That are objects among the attributes of modules, without arrays of more than `LARGEST_ARRAY_BYTES`;
    attributes of their classes, and globals that methods name.

    Args:
        blocks: modules in it that must not hold iterators.
        remedy: what to do where that is impossible.

    Raises:
        StrategyError: a block holds an iterator, which nobody can put back; or `functools.cache` has kept
            more of a function of which it kept results before: all of them are lost, so that none of the
            copy is found.
    """
    keeper = _Keeper(Rewind(), has_tensors=False)
    for number, part in enumerate(all_modules(model)):
        if not _is_of_units(plain_class(part)):
            keeper.module(part, number)
    inside = (part for block in blocks for part in all_modules(block))
    iterator = next((name for part in inside for name, held in vars(part).items() if _is_used_up(held)), None)
    if iterator is not None:
        problem = f"a block holds the iterator {iterator!r}, which a first call would use up to plan"
        raise StrategyError("ac", f"{problem}; {remedy}")
    outer, state = OuterState(model), _State(keeper.kept, keeper.large, numbers=())
    try:
        yield
    finally:
        state.put()
        outer.put_back()
        lost = outer.clear_caches()
    if lost:
        problem = (
            f"functools.cache kept results of {', '.join(lost)}, and keeps others of tensors without memory"
        )
        raise StrategyError(
            "ac", f"{problem}: all are cleared; run a step of the model first{remedy and f', or {remedy}'}"
        )


def python_state(module: nn.Module) -> Callable[[], bool]:
    """Return what says whether a forward of `module` would find what it finds now, besides tensors' values.

    That are attributes of its modules, and what objects among them hold.
    """
    return replace(_State.of(module, Rewind(), has_tensors=False), numbers=()).is_current


def state_around(module: nn.Module) -> Callable[[], bool]:
    """Return the same, with attributes of classes, globals that methods name, and what functions cache."""
    own, outer = python_state(module), OuterState(module)
    return lambda: own() and outer.is_current()


def noted_state(module: nn.Module) -> Callable[[], None]:
    """Return a function that puts everything back that a forward of `module` changes besides its results.

    That are attributes and buffers of its modules, what objects among them hold, attributes of their classes,
    globals that their methods name, and the generators of Python, NumPy and torch, those of modules included.
    """
    outer, state = OuterState(module), _State.of(module, Rewind())
    numbers = [each.now() for each in of_torch()]

    def put_back() -> None:
        state.put()
        outer.put_back()
        put(numbers)

    return put_back


@dataclass(frozen=True, slots=True)
class _State:
    """The state of a region's modules and of the generators at one moment.

    Fields:
        kept: everything that can change.
        large: the large tensors among that.
        numbers: states of Python's and NumPy's generators.
    """

    kept: list[Kept]
    large: dict[Place, _Copied | _Watched]
    numbers: tuple[State, ...]

    @classmethod
    def of(cls, module: nn.Module, rewind: Rewind, *, has_tensors: bool = True) -> _State:
        keeper = _Keeper(rewind, has_tensors=has_tensors)
        for number, part in enumerate(_read_by(module)):
            if not _is_of_units(plain_class(part)):
                keeper.module(part, number)
        return cls(keeper.kept, keeper.large, rewind.generators.states())

    def is_current(self) -> bool:
        """Say whether everything is known to be what it was."""
        return all(each.is_current() for each in chain(self.numbers, self.kept))

    def put(self) -> None:
        """Make everything what it was.

        Raises:
            RuntimeError: a large tensor has changed, of which there is no copy.
        """
        for each in chain(self.numbers, self.kept):
            if not each.is_current():
                each.put()

    def note_changes(self, rewind: Rewind) -> None:
        """Note which large tensors are not what they were."""
        rewind.changing.update(
            place for place, kept in self.large.items() if place not in rewind.changing and kept.has_changed()
        )


class _Keeper:
    """Keeps values, each container and each tensor for itself, as each is changed for itself."""

    def __init__(self, rewind: Rewind, *, has_tensors: bool = True) -> None:
        self.kept: list[Kept] = []
        self._has_tensors = has_tensors
        self.large: dict[Place, _Copied | _Watched] = {}
        self._rewind = rewind
        self._seen: set[int] = set()

    def module(self, module: nn.Module, number: int) -> None:
        """Keep attributes and buffers of a module, without those of the modules in it."""
        attributes = vars(module)
        left = frozenset(attributes.get(LEFT, getattr(type(module), LEFT, ())))
        self.kept.append(_Attributes.of(module, left))
        if module._modules:  # noqa: SLF001 (with those that are None)
            self.kept.append(_Children(module._modules, module._modules.copy()))  # noqa: SLF001
        for name, value in attributes.items():
            if not _is_constant(value) and name not in _NOT_READ and name not in left and not is_lent(value):
                self._keep(value, (number, name), DEEPEST)
        if left:
            self._seen.update(id(tensor) for name, tensor in module._buffers.items() if name in left)  # noqa: SLF001
        if module._buffers:  # noqa: SLF001 (with the names that hold None)
            self._keep(module._buffers, (number, ""), DEEPEST + 1)  # noqa: SLF001

    def _keep(self, value: Any, place: Place, depth: int) -> None:
        """Keep what `value` holds, down to `depth`."""
        if _is_constant(value) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            if self._has_tensors:
                self._tensor(value, place)
        elif depth > 0 and not (
            isinstance(value, _OPAQUE) or _is_foreign(value) or self._is_left_alone(value)
        ):
            self._container(value, place, depth - 1)

    def _is_left_alone(self, value: Any) -> bool:
        """Say so of a large array where tensors are left alone, too: it is data, and may lie in a file."""
        is_array = not self._has_tensors and isinstance(value, np.ndarray)
        return is_array and value.nbytes > LARGEST_ARRAY_BYTES

    def _tensor(self, tensor: Tensor, place: Place) -> None:
        """Keep a tensor: a copy where it is small or known to change, else its version to find out."""
        if tensor.is_meta or tensor.layout != torch.strided:
            return
        is_small = tensor.numel() * tensor.element_size() <= SMALL_BYTES
        kept: _Copied | _Watched
        if is_small or place in self._rewind.changing or not self._rewind.is_learned:
            kept = _Copied.of(tensor, place[1])
        else:
            kept = _Watched.of(tensor, place[1])
        self.kept.append(kept)
        if not is_small:
            self.large[place] = kept

    def _container(self, value: Any, place: Place, depth: int) -> None:
        kind = kind_of(value)
        if kind is not None:
            content = kind.read(value)
            if kind.write is not None:
                self.kept.append(_Content(value, kind, kind.write, content))
            if not _are_constant(kind, content):
                for key, part in kind.parts(content):
                    self._keep(part, _inside(place, key), depth)
        if type(value) not in _WITHOUT_ATTRIBUTES and not is_closed(value):
            own = attributes(value)
            if own:
                self.kept.append(_OfObject(value, own))
            for name, part in own.items():
                self._keep(part, _inside(place, name), depth)


def _read_by(module: nn.Module) -> list[nn.Module]:
    """Return `module`, the modules in it, and those that a forward set on one of them encloses.

    The copy of a module with a patched forward runs the forward of the module that was copied.
    """
    found = all_modules(module)
    for part in found:
        if "forward" in vars(part):
            others = (all_modules(each) for each in _enclosed(vars(part)["forward"]))
            found += dict.fromkeys(other for each in others for other in each if other not in found)
    return found


def _enclosed(held: Any, depth: int = DEEPEST) -> Iterator[nn.Module]:
    """Yield the modules that a function, a method or a partial call holds, through others that it holds."""
    if isinstance(held, nn.Module):
        yield held
    elif depth > 0 and callable(held) and (kind := kind_of(held)) is not None:
        for _, part in kind.parts(kind.read(held)):
            yield from _enclosed(part, depth - 1)


def all_modules(module: nn.Module) -> list[nn.Module]:
    """Return `module` and the modules in it, each once, faster than torch does."""
    found, seen = [module], {module}
    for each in found:
        for child in each._modules.values():  # noqa: SLF001 (without names)
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return found


def _not_intercepted(attributes: dict[str, Any]) -> dict[str, Any]:
    attributes.pop(_INTERCEPTED, None)
    return attributes


def _own(attributes: Mapping[str, Any], left: frozenset[str]) -> dict[str, Any]:
    return {
        name: value
        for name, value in attributes.items()
        if name not in _NOT_READ and name not in left and not is_lent(value)
    }


def _is_used_up(held: Any, depth: int = 3) -> bool:
    """Say whether an attribute is an iterator, or a container or function that holds one; a file is none."""
    if isinstance(held, list | tuple | set | dict) and depth:
        parts = held.values() if isinstance(held, dict) else held
        return any(_is_used_up(part, depth - 1) for part in parts)
    kind = kind_of(held)
    if kind is not None and kind.form == "callable" and depth:
        return any(_is_used_up(part, depth - 1) for part in kind.read(held).values())
    return isinstance(held, Iterator) and not hasattr(held, "read")


def _is_of_units(cls: type[Any]) -> bool:
    """Return whether a class is FSDP's or DDP's own, whose state goes on."""
    return cls.__module__.startswith("torch.distributed.")


def _is_foreign(value: Any) -> bool:
    """Return whether an object holds bookkeeping of torch or of strategies, which goes on."""
    return kind_of(value) is None and type(value).__module__.startswith(_FOREIGN)


def is_lent(value: Any) -> bool:
    """Say whether FSDP1 lends `value` for a call: a part of its flat parameter."""
    return isinstance(value, Tensor) and isinstance(value._base, FlatParameter)  # noqa: SLF001 (what it is a view of)


def _inside(place: Place, key: object) -> Place:
    number, path = place
    return number, f"{path}.{key}" if path else str(key)


def _are_same(now: Mapping[Any, Any], then: Mapping[Any, Any]) -> bool:
    return list(now) == list(then) and all(map(is_, now.values(), then.values()))


def _are_constant(kind: HoldingKind, content: Any) -> bool:
    """Say whether nothing of what a long container holds can change, faster than by a look at each part."""
    parts = content.values() if kind.form in ("mapping", "callable") else content
    return kind.form in ("sequence", "mapping", "set") and _CONSTANT.issuperset(map(type, parts))


def _is_constant(value: Any) -> bool:
    """Say whether nobody changes a value in place, or it is a parameter: no part of a module's state.

    Parameters of tensors without data and of DTensors have the class of these, and a mark.
    """
    return type(value) in _CONSTANT or (isinstance(value, Tensor) and getattr(value, "_is_param", False))


def _address(tensor: Tensor) -> tuple[int, torch.Size]:
    """Return where a tensor lies, which `.data` and `set_` change with no version; and its size."""
    is_real = type(tensor) in PLAIN and not tensor.is_meta
    return (tensor.data_ptr() if is_real else 0), tensor.shape


def _equal(tensor: Tensor, copy: Tensor) -> bool:
    """Say whether both are equal bit for bit; of fake tensors nothing is known."""
    if tensor.shape != copy.shape or isinstance(tensor, FakeTensor):
        return False
    words = _WORDS.get(tensor.dtype) if type(tensor) is Tensor else None
    if words is None:
        return torch.equal(tensor.detach(), copy)
    return torch.equal(tensor.detach().view(words), copy.view(words))  # -0.0 is not 0.0, and NaN is NaN
