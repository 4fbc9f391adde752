"""The shadow of a model: its modules and their code, with tensors that have shapes and no memory.

A forward can be followed on a shadow without a byte of compute, wherever the model itself stands:
a shadow is made of the plain module below FSDP2, DDP and `torch.compile`, has the global shapes of
`DTensor` parameters, and no hooks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from strategies.blocks import Enclosed, plain_class, unwrapped
from strategies.errors import StrategyError

Convert: TypeAlias = Callable[[Tensor], Tensor]

_LISTENER = "_acbench_listener"
_REBUILT = frozenset({"_modules", "_parameters", "_buffers", "_acbench_region", "_acbench_chunks"})
_HOOKS = frozenset(name for name in vars(nn.Module()) if "hooks" in name)


class Listener(Protocol):
    """What is told of the calls of a shadow's modules."""

    def called(self, module: nn.Module, body: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Return `body(*args, **kwargs)`, the call of `module`."""


class _Told(Enclosed):
    """Mark of the dynamic classes whose calls are told."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        listener: Listener | None = vars(self).get(_LISTENER)
        body = super().__call__  # type: ignore[misc]
        return body(*args, **kwargs) if listener is None else listener.called(self, body, args, kwargs)  # type: ignore[arg-type]


@dataclass(kw_only=True, slots=True)
class Shadow:
    """A model without memory.

    Fields:
        model: the shadow of the root.
        fqns: plain FQN of each shadow module, by `id`; a module used twice has its first.
        owners: (FQN of the module, attribute) of each tensor that a module holds, by `id`.
        mode: makes and runs its tensors; `None` on the meta device.
    """

    model: nn.Module
    fqns: dict[int, str] = field(default_factory=dict)
    owners: dict[int, tuple[str, str]] = field(default_factory=dict)
    mode: FakeTensorMode | None = None

    @classmethod
    def of(cls, model: nn.Module) -> Shadow:
        """Return the shadow of `model` on the meta device.

        Raises:
            StrategyError: FSDP1 has flattened parameters of the model, so that their shapes are gone.
        """
        return _cast(model, lambda tensor: _empty_like(tensor, torch.device("meta")), mode=None)

    def on(self, device: torch.device) -> Shadow:
        """Return this shadow with fake tensors that say they are on `device`."""
        # shapes that depend on data (tokens of an expert) become symbols inside a module that is not looked into
        environment = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=environment, static_shapes=True)
        with mode:
            return _cast(self.model, lambda tensor: _empty_like(tensor, device), mode=mode)

    def listen(self, listener: Listener | None) -> None:
        """Tell `listener` of every call of a module, from now on."""
        for module in self.model.modules():
            module.__dict__[_LISTENER] = listener

    def fake(self, value: Tensor, device: torch.device) -> Tensor:
        """Return a tensor of this shadow with the shape, strides and dtype of `value`."""
        assert self.mode is not None
        with self.mode:
            return _empty_like(value, device)


def _cast(model: nn.Module, convert: Convert, mode: FakeTensorMode | None) -> Shadow:
    shadow = Shadow(model=nn.Module(), mode=mode)
    modules: dict[int, nn.Module] = {}
    tensors: dict[int, Tensor] = {}

    def held(tensor: Any, fqn: str, name: str) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        if id(tensor) not in tensors:
            cast = convert(tensor)
            tensors[id(tensor)] = cast
            shadow.owners[id(cast)] = fqn, name
        return tensors[id(tensor)]

    def module(outer: nn.Module, fqn: str) -> nn.Module:
        source = unwrapped(outer)
        if id(source) in modules:
            return modules[id(source)]
        if isinstance(outer, FullyShardedDataParallel):
            problem = f"{fqn or plain_class(source).__name__!r} is an FSDP1 unit, which hides the shapes of parameters"
            raise StrategyError(
                "ac", f"{problem}; apply the variant before FSDP1, use wrap_order=inside_fsdp"
            )
        cls = _told(plain_class(source))
        twin: nn.Module = cls.__new__(cls)
        modules[id(source)] = twin
        shadow.fqns[id(twin)] = fqn
        for name, value in vars(source).items():
            if name not in _REBUILT:
                twin.__dict__[name] = OrderedDict() if name in _HOOKS else held(value, fqn, name)
        for group in ("_parameters", "_buffers"):
            twin.__dict__[group] = {name: held(v, fqn, name) for name, v in getattr(source, group).items()}
        prefix = f"{fqn}." if fqn else ""
        twin.__dict__["_modules"] = {
            name: None if child is None else module(child, prefix + name)
            for name, child in source._modules.items()  # noqa: SLF001 (children that are None count too)
        }
        return twin

    shadow.model = module(model, "")
    return shadow


@cache  # one class per class
def _told(original: type[Any]) -> type[nn.Module]:
    return type(original.__name__, (_Told, original), {"__module__": original.__module__})


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    # a DTensor says its global shape; its strides are those of the global tensor too
    empty = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty.requires_grad_(tensor.requires_grad)
