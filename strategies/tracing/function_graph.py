"""Function graphs: one module's forward as a graph of torch functions and submodule calls.

The forward runs as Python, with the user's own control flow, on tensors without memory. Each call of a torch
function (`torch.arange`, `functional.dropout`, `Tensor.view`) becomes a node, and so does each call of a
submodule. The graph has functions rather than kernels, so autograd, autocast, random numbers and `DTensor`
act when the graph runs. It has calls rather than their insides, so submodules keep their hooks and those of
FSDP.

`torch.fx.symbolic_trace` would not do: a proxy has no value, so that `torch.arange(tokens.size(1))`
and every `if` over a shape or an optional input of a `transformers` model stop it.
"""

from __future__ import annotations

import builtins
import inspect
import operator
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import increment_version
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves

from strategies.base import StrategyError
from strategies.tracing.guard import switches
from strategies.tracing.module_state import CONSTANTS, SideEffects
from strategies.tracing.recorder import Frame
from strategies.tracing.shadow import Shadow
from strategies.tracing.shape_values import QUESTIONS, with_known_values

_MORE_CONSTANTS = (*CONSTANTS, torch.layout, torch.memory_format, torch.finfo, torch.iinfo)
_QUERIES = frozenset(
    """size shape dim ndim ndimension numel nelement __len__ stride dim_order is_contiguous is_same_size
    dtype type element_size itemsize nbytes is_floating_point is_complex is_signed is_tensor is_quantized
    result_type promote_types can_cast layout is_sparse is_sparse_csr is_mkldnn is_nested names has_names
    device get_device is_cpu is_cuda is_mps is_xpu is_meta requires_grad is_grad_enabled _set_grad_enabled
    is_autocast_enabled get_autocast_dtype get_default_dtype __repr__ __format__ __hash__""".split()  # noqa: SIM905
)
"""Functions and properties with one answer for all tensors of one kind, and so for every run of a graph."""


class FunctionRecorder(TorchFunctionMode):
    """Records the forward of a shadow's model.

    Args:
        shadow: shadow of the module, with fake tensors.
        through: FQNs of the submodules that are looked into.
        name: name of the module in messages.
    """

    def __init__(self, shadow: Shadow, through: frozenset[str], name: str) -> None:
        super().__init__()
        self._shadow = shadow
        self._through = through
        self._name = name
        self._frame = Frame()
        self._graph = self._frame.graph
        self._calls: Counter[str] = Counter()
        self._failure: Exception | None = None
        self._effects = SideEffects({shadow.fqns[id(module)]: module for module in shadow.model.modules()})
        self._is_quiet = True
        self._context = _context()

    def record(self, args: tuple[Any, ...]) -> fx.Graph:
        """Return what forward does on positional inputs, tensors of the shadow.

        Placeholders are the tensors among the inputs, in the order of `tree_leaves`; the output is a tuple of
        tensors. A submodule's call has `meta["fqn"]`, its plain FQN below the module, and `meta["call"]`, how
        many calls it had before; every node has its fake result in `meta["val"]`, and one that changes
        tensors in place has these in `meta["mutates"]`.

        Raises:
            StrategyError: forward does what a graph cannot hold; the message names it.
        """
        names = [*inspect.signature(self._shadow.model.forward).parameters, *["inputs"] * len(args)]
        for name, value in zip(names, args, strict=False):
            for leaf in tree_leaves(value):
                if isinstance(leaf, Tensor):
                    self._frame.own(leaf, self._graph.placeholder(name))
        with self._shadow.listening(self), with_known_values(), self:
            self._effects.forgive("")
            self._is_quiet = False
            leaves, structure = tree_flatten(self._shadow.model.forward(*args))
            self._is_quiet = True
            self._refuse(self._effects.found(""))
            if self._failure is not None:
                raise self._failure  # forward has caught it, and has gone on as it would not with data
        return self._finished(leaves, structure)

    def read(self, module: nn.Module, name: str) -> None:
        """Take note that forward reads `module.name`."""
        if not self._is_quiet:
            self._frame.note_read(self._shadow.fqns[id(module)], name)

    def called(self, module: nn.Module, body: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Return `body(*args, **kwargs)`, recorded as one call unless the module is looked into."""
        fqn = self._shadow.fqns[id(module)]
        if self._is_quiet or fqn in self._through:
            return body(*args, **kwargs)
        self._check_context(repr(fqn))
        node_args, node_kwargs = self._arguments(args, fqn), self._arguments(kwargs, fqn)
        self._is_quiet = True
        try:
            self._refuse(self._effects.found(fqn))
            changes = _Changes((args, kwargs, list(module.parameters()), list(module.buffers())))
            result = body(*args, **kwargs)
            changed = changes.now()
            self._effects.forgive(fqn)
        finally:
            self._is_quiet = False
        node = self._graph.call_module(fqn, node_args, node_kwargs)
        node.meta |= {"fqn": fqn, "call": self._calls[fqn], "mutates": changed}
        self._calls[fqn] += 1
        self._results(result, node, f"{fqn!r} returns")
        return result

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch and record it, or refuse it where a graph cannot hold it."""
        kwargs = kwargs or {}
        if self._is_quiet:
            result = func(*args, **kwargs)
            _note_running_statistics(func, args, kwargs)
            return result
        self._refuse(self._effects.seeding())
        changes = _Changes((args, kwargs))
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            self._failure = error
            raise
        _note_running_statistics(func, args, kwargs)
        changed = changes.now()
        name = _name(func)
        has_tensors = any(isinstance(leaf, Tensor) for leaf in tree_leaves(result))
        if not has_tensors and not changed:
            is_answered = name in QUESTIONS and isinstance(result, bool | int | float | list)
            if is_answered or (name in _QUERIES and func.__name__ != "__set__"):
                return result
            raise self._error(f"calls {name!r}, whose result depends on data or stays outside of a graph")
        self._check_context(repr(name))
        node = self._node_of(func, name, self._arguments(args, name), self._arguments(kwargs, name))
        node.meta["mutates"] = changed
        self._results(result, node, f"{name!r} returns")
        return result

    def _node_of(self, func: Any, name: str, args: Any, kwargs: Any) -> fx.Node:
        if func.__name__ == "__get__":
            return self._graph.call_function(builtins.getattr, (args[0], name))
        if getattr(Tensor, name, None) is func:
            return self._graph.call_method(name, args, kwargs)
        return self._graph.call_function(func, args, kwargs)

    def _arguments(self, value: Any, where: str) -> Any:
        if isinstance(value, Tensor):
            return self._node(value, where)
        if type(value) in _MORE_CONSTANTS or isinstance(value, torch._ops.OpOverload):  # noqa: SLF001
            return value
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise self._error(f"gives {where!r} a number that depends on data")
        if type(value) is torch.Size:
            return self._graph.call_function(torch.Size, (list(value),))  # a tuple would be no `torch.Size`
        if type(value) in {slice, dict, list, tuple} or _is_named_tuple(value):
            return self._container(value, where)
        raise self._error(f"gives {where!r} a {type(value).__name__}, which no graph can hold")

    def _container(self, value: Any, where: str) -> Any:
        """Return a container with nodes instead of tensors."""
        if isinstance(value, slice):
            return slice(*(self._arguments(each, where) for each in (value.start, value.stop, value.step)))
        if isinstance(value, dict):
            return {key: self._arguments(each, where) for key, each in value.items()}
        held = [self._arguments(each, where) for each in value]
        return type(value)(*held) if _is_named_tuple(value) else type(value)(held)

    def _node(self, tensor: Tensor, where: str) -> fx.Node:
        if id(tensor) in self._frame.nodes:
            return self._frame.nodes[id(tensor)]
        if id(tensor) not in self._shadow.owners:
            problem = f"gives {where!r} a tensor that no recorded function made"
            raise self._error(
                f"{problem}; torch.autograd.Function and tensors outside of modules cannot be followed"
            )
        fqn, name = self._shadow.owners[id(tensor)]
        # read again at every use: FSDP exchanges parameters, and a region must not take one as its input
        node = self._graph.get_attr(f"{fqn}.{name}" if fqn else name)
        node.meta["val"] = tensor
        return node

    def _results(self, result: Any, node: fx.Node, where: str) -> None:
        """Note the tensors of a result as those of a node, or refuse a result that no graph can hold."""
        node.meta["val"] = result
        if isinstance(result, Tensor):
            self._frame.own(result, node)
        elif isinstance(result, Mapping | tuple | list):
            for part, at in self._frame.parts(result, node, (type(None),)):
                self._results(part, at, where)
        elif result is not None:
            problem = f"cannot be recorded: {where} a {type(result).__name__}"
            raise self._error(f"{problem}; a recorded forward supports only tensors and Python containers")

    def _finished(self, leaves: list[Any], _structure: TreeSpec) -> fx.Graph:
        """Return the graph of a forward that returns `leaves`."""
        self._frame.finish(leaves, lambda tensor: self._node(tensor, "output"), self._error)
        for node in reversed(self._graph.nodes):
            if node.target is operator.getitem and not node.users:
                self._graph.erase_node(node)
        return self._graph

    def _check_context(self, what: str) -> None:
        """Refuse a call under another mode of torch than forward began with, which no graph would set."""
        if _context() == self._context:
            return
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 (who called is the question)
        while frame is not None and frame.f_code is not FunctionRecorder.record.__code__:
            if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
                problem = f"calls {what} inside torch.utils.checkpoint"
                raise self._error(f"{problem}; take that call out and label what it held, regions replace it")
            frame = frame.f_back
        problem = f"calls {what} under its own grad mode, autocast, saved-tensor hooks or switches of torch"
        raise self._error(f"{problem}; put that part into a module")

    def _refuse(self, effect: str | None) -> None:
        if effect is not None:
            raise self._error(f"{effect}, which no region would repeat; put that part into a module")

    def _error(self, problem: str) -> StrategyError:
        self._failure = StrategyError("ac", f"{self._name} {problem}")
        return self._failure


def _name(func: Any) -> str:
    if func.__name__ not in {"__get__", "__set__"}:
        return str(func.__name__)
    descriptor: Any = func.__self__
    owner: Any = descriptor.fget if isinstance(descriptor, property) else descriptor
    return str(owner.__name__)


class _Changes:
    """Finds the tensors among `values` that are changed in place from now on."""

    def __init__(self, values: Any) -> None:
        tensors = {id(leaf): leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}
        self._versions = [(tensor, tensor._version) for tensor in tensors.values()]  # noqa: SLF001

    def now(self) -> tuple[Tensor, ...]:
        """Return those that have been changed."""
        return tuple(tensor for tensor, version in self._versions if tensor._version != version)  # noqa: SLF001


def _note_running_statistics(func: Any, args: Any, kwargs: Any) -> None:
    """Count as changed what normalisation updates: these functions do not say so."""
    switch = {functional.batch_norm: "training", functional.instance_norm: "use_input_stats"}.get(func)
    if switch is None:
        return
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    for tensor in (given["running_mean"], given["running_var"]):
        if tensor is not None and given[switch]:
            increment_version(tensor)


def _is_named_tuple(value: Any) -> bool:
    return type(value).__bases__ == (tuple,) and hasattr(value, "_fields")


def _context() -> tuple[Any, ...]:
    """Return what decides, besides its inputs, what an operator does and what autograd keeps of it."""
    return switches(), torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: SLF001 (no public way)
