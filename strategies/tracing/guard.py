"""Guards: what a recorded program was recorded for, and whether that still holds.

A recording takes for constant whatever forward asks of Python: of which kinds its inputs are, and which of
them are one tensor; the attributes that it reads of modules; the forwards and hooks of the modules that it
calls; and torch's switches. A program runs only where all of it is as it was. Somebody who finds no such
program records another one, or refuses.

Not seen are globals, what functions close over, and attributes that code reads of a class or out of
`__dict__`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import _has_any_global_hook  # no public way
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten

from strategies.base import StrategyError
from strategies.estimate.liveness import key_of
from strategies.estimate.patched import original_of
from strategies.regions.blocks import Disguised, plain_class, submodule, unwrapped
from strategies.tracing.module_state import (
    CONSTANTS,
    HOOKS,
    ByIdentity,
    frozen,
    held_by,
    hooks_of,
    is_capture,
    kind_of_tensor,
)

PROGRAMS = 64
"""Programs that are kept; beyond that the one that ran longest ago is dropped."""

P = TypeVar("P")
_PLAIN = frozenset({bool, int, str, type(None)})
"""Types of most attributes, which `frozen` compares by type and value."""
_GROUPS = frozenset({"_parameters", "_buffers", "_modules"})


class _Nothing:
    """Stands for an attribute, or its module, that is not there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """The call of a forward, as far as a recording takes it for constant.

    Fields:
        kind: equal for calls with inputs of one structure and kind, the same ones of which are one tensor,
            under the same switches of torch.
        tensors: tensors among the inputs, in the order of `tree_leaves`.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    kind: Hashable
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, where: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Return the call with these inputs, now.

        Raises:
            StrategyError: an input is neither a dense tensor nor a constant; it names `where`.
        """
        leaves, structure = tree_flatten((args, kwargs))
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        places = {id(tensor): at for at, tensor in enumerate(tensors)}
        same = tuple(places[id(tensor)] for tensor in tensors)
        kinds = tuple(_kind_of_input(where, leaf) for leaf in leaves)
        return cls(args=args, kwargs=kwargs, kind=(structure, kinds, same, switches()), tensors=tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """Everything that the forward of a module depends on in addition to its inputs.

    Fields:
        reads: what it has read, by FQN of a module and attribute.
        is_exact: whether kinds of tensors count, which of them, of the inputs and of modules are one, and
            what wraps modules or hooks them for FSDP: what decides what a graph does, rather than Python.
        writes_to_inputs: whether it writes to its inputs in place.
    """

    reads: Mapping[tuple[str, str], object]
    is_exact: bool = True
    writes_to_inputs: bool = False

    @classmethod
    def of(
        cls,
        module: nn.Module,
        tensors: Sequence[Tensor],
        places: Iterable[tuple[str, str]],
        *,
        is_exact: bool = True,
        writes_to_inputs: bool = False,
    ) -> Guard:
        """Return what the forward of `module` depends on, which has read `places` and takes `tensors`."""
        reads = dict(_values_read(module, tensors, places, is_exact=is_exact))
        return cls(reads=reads, is_exact=is_exact, writes_to_inputs=writes_to_inputs)

    def fits(self, module: nn.Module, tensors: Sequence[Tensor]) -> bool:
        """Return whether all that forward depends on is what it was."""
        return self._may_write(tensors) and self.changed(module, tensors) is None

    def changed(self, module: nn.Module, tensors: Sequence[Tensor] = ()) -> str | None:
        """Return the FQN of the first attribute that is not what it was."""
        values = _values_read(module, tensors, self.reads, is_exact=self.is_exact)
        places = (place for place, value in values if value != self.reads[place])
        return next((".".join(place).lstrip(".") for place in places), None)

    def taken_over(self, module: nn.Module, tensors: Sequence[Tensor]) -> Guard | None:
        """Return the guard of another module of the same code; `None` if that reads something else."""
        reads: dict[tuple[str, str], object] = {}
        for place, value in _values_read(module, tensors, self.reads, is_exact=self.is_exact):
            reads[place] = value
            if not _is_alike(value, self.reads[place]):  # what was read next may not be there
                return None
        return replace(self, reads=reads) if self._may_write(tensors) else None

    def _may_write(self, tensors: Sequence[Tensor]) -> bool:
        return not (self.writes_to_inputs and share_memory(tensors))


@dataclass(kw_only=True, slots=True)
class Programs(Generic[P]):
    """Programs by the kind of call that they were recorded for; a copy has none of them."""

    _held: list[tuple[Hashable, P]] = field(default_factory=list)

    def __reduce__(self) -> tuple[Any, ...]:
        return Programs, ()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def latest(self) -> P | None:
        """The program that was kept last."""
        return self._held[-1][1] if self._held else None

    def find(self, kind: Hashable, accept: Callable[[P], P | None]) -> P | None:
        """Return what `accept` makes of a program for calls of this kind, the latest first."""
        for known, program in reversed(self._held):
            accepted = accept(program) if known == kind else None
            if accepted is not None:
                return accepted
        return None

    def keep(self, kind: Hashable, program: P) -> None:
        """Keep `program` as the latest."""
        self._held = [held for held in self._held if held[1] is not program]
        self._held = [*self._held, (kind, program)][-PROGRAMS:]


def refuse_unseen(where: str, fqn: str, module: nn.Module) -> None:
    """Refuse a module whose call does what a recording does not see.

    Raises:
        StrategyError: it has hooks that do not only collect hidden states, or a forward of its own; it names
            `where` and `fqn`.
    """
    if not all(map(is_capture, hooks_of(module))):
        problem = f"{fqn!r} has hooks, which a planned forward does not call"
        raise StrategyError(where, f"{problem}; remove them")
    forward = held_by(module, "forward")
    if forward is not None and getattr(forward, "__self__", None) is not module:
        problem = f"{fqn!r} has a forward that is a function, whose state nobody watches"
        raise StrategyError(where, f"{problem}; write it into a class")


def refuse_global_hooks(where: str) -> None:
    """Refuse hooks on all modules. Raises StrategyError: there are some; it names `where`."""
    if _has_any_global_hook():
        problem = "needs a process without hooks on all modules, which would see other calls"
        raise StrategyError(where, f"{problem}; remove them")


def has_another_class(module: nn.Module) -> bool:
    """Return whether the class of `module` is one that somebody has derived from a dynamic class."""
    return _is_derived(type(module))  # type: ignore[arg-type]


@cache
def _is_derived(cls: type[Any]) -> bool:
    of_modules = (each for each in cls.__mro__ if issubclass(each, nn.Module))
    return any(issubclass(each, (Disguised, FSDPModule)) and len(each.__bases__) == 1 for each in of_modules)


def share_memory(tensors: Sequence[Tensor]) -> bool:
    """Return whether two different ones of `tensors` lie on the same memory."""
    different = {id(tensor): tensor for tensor in tensors}.values()
    return len({key_of(tensor) for tensor in different}) < len(different)


def attribute_of_a_tensor(leaves: Iterable[Any]) -> str | None:
    """Return the first attribute that somebody has set on a tensor; `None` where there is none."""
    for leaf in leaves:
        if type(leaf) not in {Tensor, FakeTensor} or isinstance(leaf, nn.Parameter | nn.Buffer):
            continue
        own = _attributes_of_a_fake() if type(leaf) is FakeTensor else frozenset()
        names = (name for name in vars(leaf) if name not in own and not name.startswith("_dynamo_"))
        name: str | None = next(names, None)
        if name is not None:
            return name
    return None


@cache
def _attributes_of_a_fake() -> frozenset[str]:
    with _disable_current_modes(), FakeTensorMode():
        return frozenset(vars(torch.empty(0)))


def refuse_attributes(where: str, leaves: Iterable[Any]) -> None:
    """Refuse inputs with attributes, which a forward may read and a graph does not hold.

    Raises:
        StrategyError: a tensor has one; it names `where` and the attribute.
    """
    name = attribute_of_a_tensor(leaves)
    if name is not None:
        problem = f"forward is called with a tensor that has the attribute {name!r}, which no graph can hold"
        raise StrategyError(where, f"{problem}; give it as an input of its own")


def kind_of_result(result: Any) -> Hashable:
    """Return what a recording takes for constant of what a module returns: structure, shapes and dtypes."""
    leaves, structure = tree_flatten(result)
    return structure, tuple(_kind_of_leaf(leaf) for leaf in leaves)


def switches() -> Hashable:
    """Return what decides, besides inputs and modules, what an operator does."""
    devices = ("cpu", "cuda")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        tuple((torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in devices),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.enabled,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    )


def _kind_of_input(where: str, leaf: Any) -> Hashable:
    """Return of an input all that a graph depends on; refuse what no graph can hold."""
    if isinstance(leaf, Tensor):
        if leaf.layout is not torch.strided or leaf.is_nested:
            problem = "forward is called with a sparse or nested tensor, which no graph can hold"
            raise StrategyError(where, problem)
        refuse_attributes(where, [leaf])
        flags = leaf.requires_grad, leaf.is_conj(), leaf.is_neg()
        return type(leaf), leaf.shape, leaf.stride(), leaf.dtype, leaf.device, flags
    if isinstance(leaf, CONSTANTS):
        return type(leaf), repr(leaf) if isinstance(leaf, float | complex) else leaf
    raise StrategyError(where, f"forward is called with a {type(leaf).__name__}, which no graph can hold")


def _kind_of_leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    return type(leaf), leaf if isinstance(leaf, CONSTANTS) else None


def _values_read(
    module: nn.Module, tensors: Sequence[Tensor], places: Iterable[tuple[str, str]], *, is_exact: bool
) -> Iterator[tuple[tuple[str, str], object]]:
    numbers: dict[int, int] = {}
    for tensor in tensors:
        numbers.setdefault(id(tensor), len(numbers))

    def numbered(value: Any) -> object:
        return numbers.setdefault(id(value), len(numbers)), kind_of_tensor(value)

    of_torch = numbered if is_exact else _as_python_has_it
    modules: dict[str, nn.Module | None] = {}
    for fqn, name in places:
        if fqn not in modules:
            modules[fqn] = module_at(module, fqn)
        owner = modules[fqn]
        yield (fqn, name), _Nothing if owner is None else _value_read(owner, name, of_torch)


def module_at(root: nn.Module, fqn: str) -> nn.Module | None:
    """Return a module below its wrappers; `None` where the FQN leads to none, as after a swap on the way."""
    try:
        return unwrapped(submodule(root, fqn))
    except AttributeError:
        return None


def _value_read(module: nn.Module, name: str, of_torch: Callable[[Any], object]) -> object:
    """Return what a forward read of a module, as far as a graph depends on it."""
    if name in HOOKS and not vars(module)[name]:
        return ()
    value = held_by(module, name, _Nothing)
    if type(value) in _PLAIN:
        return type(value), value
    if value is _Nothing:
        value = next((vars(c)[name] for c in plain_class(module).__mro__ if name in vars(c)), _Nothing)
    if name == "forward":
        return of_torch(module), plain_class(module), has_another_class(module), frozen(original_of(value))
    if name in HOOKS:
        is_exact = of_torch is not _as_python_has_it
        return tuple(ByIdentity(hook) for hook in value.values() if is_exact or not is_of_fsdp(hook))
    if isinstance(value, Tensor | nn.Module) or name in _GROUPS or of_torch is _as_python_has_it:
        return frozen(value, of_torch)
    return frozen(value, _kind_and_identity)


def _as_python_has_it(value: Any) -> object:
    return ByIdentity(unwrapped(value)) if isinstance(value, nn.Module) else Tensor


def _kind_and_identity(value: Any) -> object:
    return ByIdentity(value), kind_of_tensor(value)


def is_of_fsdp(hook: Any) -> bool:
    """Return whether a hook is one of FSDP's own."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed")


def _is_alike(value: object, other: object) -> bool:
    """Say if two reads are equal, submodules by their class: what is read of them is compared for itself."""
    if value == other:
        return True
    if isinstance(value, tuple) and isinstance(other, tuple):
        return len(value) == len(other) and all(map(_is_alike, value, other))
    if not (isinstance(value, ByIdentity) and isinstance(other, ByIdentity)):
        return False
    modules = value.value, other.value
    return all(isinstance(each, nn.Module) for each in modules) and (
        plain_class(modules[0]) is plain_class(modules[1])
    )
