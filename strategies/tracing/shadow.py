"""The shadow of a model: its modules and their code, with tensors that have shapes and no memory.

A forward can be followed on a shadow without a byte of compute, wherever the model itself stands:
a shadow is made of the plain module below FSDP2, DDP and `torch.compile`, has the global shapes of
`DTensor` parameters, the dtypes of FSDP's mixed precision, and of hooks only those that collect hidden
states, and torch's of weight and spectral norm.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from types import MethodType
from typing import Any, Protocol
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves, tree_map_only

from strategies.base import StrategyError
from strategies.regions.blocks import Disguised, plain_class, unwrapped
from strategies.tracing.fakes import Fakes
from strategies.tracing.module_state import (
    BOOKKEEPING,
    LISTENER,
    held_by,
    is_capture,
    makes_weight,
    restored_generators,
)

PARTS = "_acbench_parts"
"""The attribute of a module that gives and takes parts: a function of its plain call and its inputs, which
are without memory, that returns a part without memory."""

_REBUILT = frozenset(
    {
        "_modules",
        "_parameters",
        "_buffers",
        "_compiled_call_impl",
        "_acbench_region",
        "_acbench_chunks",
        LISTENER,
    }
)
_INPUTS = "_acbench_inputs"  # of a shadow of an FSDP unit: the dtype that it gives its inputs
_COPIED = frozenset({list, tuple, set, dict, OrderedDict, defaultdict, deque})
_HOOKS = frozenset(name for name in BOOKKEEPING if "hooks" in name)


class Listener(Protocol):
    """A listener to the calls of a shadow's modules, and to the attributes that are read of them."""

    def called(self, module: nn.Module, body: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Return `body(*args, **kwargs)`, the call of `module`."""

    def read(self, module: nn.Module, name: str) -> None:
        """Take note that somebody reads `module.name`."""


class Told(Disguised):
    """Mark of the dynamic classes whose calls and reads are told."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, through the listener if there is one."""
        listener: Listener | None = vars(self).get(LISTENER)
        body = partial(_call_in, vars(self).get(_INPUTS), super().__call__)  # type: ignore[misc]
        if PARTS in vars(self):
            body = partial(vars(self)[PARTS], body)
        return body(*args, **kwargs) if listener is None else listener.called(self, body, args, kwargs)  # type: ignore[arg-type]

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__"):
            listener: Listener | None = vars(self).get(LISTENER)
            if listener is not None:
                listener.read(self, name)  # type: ignore[arg-type]
        return super().__getattribute__(name)


@dataclass(kw_only=True, slots=True)
class Shadow:
    """A model without memory.

    Fields:
        fqns: plain FQN of each shadow module, by `id`; a module used twice has its first.
        owners: (FQN of the module, attribute) of each tensor that a module holds, by `id`.
        mode: makes and runs its tensors; `None` on the meta device.
    """

    model: nn.Module
    fqns: dict[int, str] = field(default_factory=dict)
    owners: dict[int, tuple[str, str]] = field(default_factory=dict)
    mode: FakeTensorMode | None = None

    @classmethod
    def of(cls, model: nn.Module, earlier: Shadow | None = None) -> Shadow:
        """Return the shadow of `model` on the meta device.

        Args:
            model: plain, or wrapped and sharded.
            earlier: a shadow whose parameters and buffers are taken, where FSDP has made the model's its own.

        Raises:
            StrategyError: FSDP1 has flattened parameters, their shapes are gone, and there is no `earlier`.
        """
        meta = torch.device("meta")
        return _cast(model, meta, mode=None, earlier=earlier)

    def on(self, device: torch.device) -> Shadow:
        """Return this shadow with fake tensors that say they are on `device`."""
        # shapes that depend on data, as tokens of an expert, become symbols inside a module that is called
        environment = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
        mode = Fakes(allow_non_fake_inputs=True, shape_env=environment, static_shapes=True)
        with mode:
            return _cast(self.model, device, mode=mode)

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Run with tensors of this shadow and tell `listener` of every call of a module.

        Random number generators are left as they were, those of modules included.
        """
        assert self.mode is not None
        self._tell(listener)
        try:
            with restored_generators(self.model.modules()), self.mode:
                yield
        finally:
            self._tell(None)

    def _tell(self, listener: Listener | None) -> None:
        for module in self.model.modules():
            vars(module)[LISTENER] = listener


def shadowed(shadow: Shadow, inputs: Any, device: torch.device) -> Any:
    """Return `inputs` with every tensor as one of `shadow`, on `device`; the same one for the same."""
    assert shadow.mode is not None
    with shadow.mode:
        return mapped_once(partial(_empty_like, device=device), inputs)


def without_memory(inputs: Any) -> Any:
    """Return `inputs` with every tensor on the meta device; the same one for the same."""
    return mapped_once(partial(_empty_like, device=torch.device("meta")), inputs)


def mapped_once(make: Callable[[Tensor], Tensor], inputs: Any) -> Any:
    """Return `inputs` with `make` of every tensor, the same one for the same."""
    tensors = {id(leaf): leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)}
    made = {key: make(tensor) for key, tensor in tensors.items()}
    return tree_map_only(Tensor, lambda tensor: made[id(tensor)], inputs)


def device_of(leaves: list[Any]) -> torch.device:
    """Return the device of the first tensor; the CPU where there is none, or where it has no memory."""
    found = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))
    return torch.device("cpu") if found.type == "meta" else found


def compute_in(dtype: torch.dtype, model: nn.Module, units: Iterable[nn.Module]) -> None:
    """Prepare a plain `model` without memory for its shadow to be that of FSDP's mixed precision.

    Args:
        dtype: dtype of parameters in use, and of floating-point inputs of units.
        model: on the meta device; changed in place.
        units: its modules that will be FSDP units.
    """
    for parameter in model.parameters():
        _set_dtype(parameter, dtype)
    for unit in units:
        vars(unit)[_INPUTS] = dtype


def cast_inputs(inputs: Any, dtype: torch.dtype | None) -> Any:
    """Return inputs as a unit takes them: floating-point tensors in `dtype`, if it has one."""
    if dtype is None:
        return inputs
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, inputs)


def _cast(
    model: nn.Module, device: torch.device, mode: FakeTensorMode | None, earlier: Shadow | None = None
) -> Shadow:
    caster = _Caster(device, Shadow(model=nn.Module(), mode=mode), earlier)
    caster.shadow.model = caster.twin_of(model, "")
    caster.fill()
    return caster.shadow


class _Caster:
    """Makes the twin of every module, and then gives it what the module holds.

    Containers are copied, so that what a forward puts into one is not found in the model's.
    """

    def __init__(self, device: torch.device, shadow: Shadow, earlier: Shadow | None) -> None:
        self.shadow = shadow
        self._device = device
        self._earlier = earlier
        self._twins: dict[int, tuple[nn.Module, nn.Module, str, torch.dtype | None]] = {}
        self._casts: dict[int, Any] = {}

    def twin_of(self, outer: nn.Module, fqn: str, dtype: torch.dtype | None = None) -> nn.Module:
        """Return the twin of the plain module in `outer`, and make those of its submodules.

        Args:
            dtype: dtype of parameters in use, where an FSDP unit around the module says so.
        """
        source = unwrapped(outer)
        if id(source) in self._twins:
            return self._twins[id(source)][1]
        if isinstance(outer, FullyShardedDataParallel) and self._earlier is None:
            where = repr(fqn or plain_class(source).__name__)
            raise StrategyError(
                "ac",
                f"{where} is an FSDP1 unit, which hides the shapes of parameters; "
                "apply the variant before FSDP1, use wrap_order=inside_fsdp",
            )
        cls = _told(plain_class(source))  # type: ignore[arg-type]
        twin: nn.Module = cls.__new__(cls)
        if fqn:  # what is around the root has been at its inputs and parameters already
            dtype, inputs = _mixed_precision(outer) or (dtype, None)
            twin.__dict__[_INPUTS] = vars(source).get(_INPUTS, inputs)
        self._twins[id(source)] = source, twin, fqn, dtype
        self.shadow.fqns[id(twin)] = fqn
        prefix = f"{fqn}." if fqn else ""
        twin.__dict__["_modules"] = {
            name: None if child is None else self.twin_of(child, prefix + name, dtype)
            for name, child in source._modules.items()  # noqa: SLF001 (children that are None count too)
        }
        return twin

    def fill(self) -> None:
        """Give each twin the attributes of its module, parameters and buffers first: they have a name."""
        for source, twin, fqn, dtype in self._twins.values():
            self._fill_tensors(source, twin, fqn, dtype)
        for source, twin, fqn, _ in self._twins.values():
            for name, value in vars(source).items():
                if name in _HOOKS:
                    stays = {
                        key: each for key, each in value.items() if is_capture(each) or makes_weight(each)
                    }
                    twin.__dict__[name] = OrderedDict(stays)
                elif name not in _REBUILT and name not in twin.__dict__["_parameters"]:
                    twin.__dict__[name] = self._named(value, fqn, name)

    def _fill_tensors(self, source: nn.Module, twin: nn.Module, fqn: str, dtype: torch.dtype | None) -> None:
        """Give a twin the shadows of parameters and buffers, in the dtype of the source or in `dtype`."""
        tensors = source if self._earlier is None else self._earlier.model.get_submodule(fqn)
        for group in ("_parameters", "_buffers"):
            held = getattr(tensors, group).items()
            twin.__dict__[group] = {name: self._named(value, fqn, name) for name, value in held}
        for name, parameter in twin.__dict__["_parameters"].items():
            _set_dtype(parameter, dtype or getattr(held_by(source, name), "dtype", None))

    def _named(self, value: Any, fqn: str, name: str) -> Any:
        cast = self._cast(value)
        if isinstance(cast, Tensor):
            self.shadow.owners.setdefault(id(cast), (fqn, name))
        return cast

    def _cast(self, value: Any) -> Any:
        """Return the shadow of a module, method, tensor or container; other values stand for themselves."""
        if isinstance(value, nn.Module):
            return self._twins[id(unwrapped(value))][1] if id(unwrapped(value)) in self._twins else value
        if isinstance(value, MethodType) and id(value.__self__) in self._twins:
            return MethodType(value.__func__, self._twins[id(value.__self__)][1])
        if isinstance(value, ReferenceType) and isinstance(value(), Tensor):
            return ref(self._cast(value()))
        if not isinstance(value, Tensor) and type(value) not in _COPIED:
            return value
        if id(value) not in self._casts:
            is_tensor = isinstance(value, Tensor)
            self._casts[id(value)] = _empty_like(value, self._device) if is_tensor else self._copied(value)
        return self._casts[id(value)]

    def _copied(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(self._cast, value))
        copied = self._casts[id(value)] = copy.copy(value)  # before what it holds, which may hold it
        if not isinstance(value, set):
            for key, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
                copied[key] = self._cast(each)
        return copied


@cache  # one class per class
def _told(original: type[Any]) -> type[nn.Module]:
    return type(original.__name__, (Told, original), {"__module__": original.__module__})


def _mixed_precision(outer: nn.Module) -> tuple[torch.dtype, torch.dtype | None] | None:
    """Return the dtypes of parameters in use and of inputs that an FSDP unit decides on, if it does."""
    if isinstance(outer, FullyShardedDataParallel):
        policy: Any = outer.mixed_precision
    elif isinstance(outer, FSDPModule):
        policy = outer._get_fsdp_state()._mp_policy  # noqa: SLF001 (no public way to ask)
    else:
        return None
    if policy.param_dtype is None:
        return None
    return policy.param_dtype, policy.param_dtype if policy.cast_forward_inputs else None


def _call_in(dtype: torch.dtype | None, body: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    args, kwargs = cast_inputs((args, kwargs), dtype)
    return body(*args, **kwargs)


def _set_dtype(parameter: Tensor | None, dtype: torch.dtype | None) -> None:
    if parameter is not None and dtype not in {None, parameter.dtype} and parameter.is_floating_point():
        parameter.data = parameter.data.to(dtype)


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    # a DTensor says its global shape; its strides are those of the global tensor too
    empty = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty.requires_grad_(tensor.requires_grad)
