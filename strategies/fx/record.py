"""Recording of one module's forward as a graph, on its shadow.

The forward runs as Python, with the user's own control flow, on tensors without memory; what is
recorded is each call of a torch function (`torch.arange`, `functional.dropout`, `Tensor.view`), and
each call of a submodule as one node. Recording functions rather than kernels leaves autograd, autocast,
random numbers and `DTensor` to the moment when the graph runs; recording calls rather than their insides
leaves submodules, with their hooks and FSDP's, as they are.

`torch.fx.symbolic_trace` would not do: a proxy has no value, so that `torch.arange(tokens.size(1))`
and every `if` over a shape or an optional input of a `transformers` model stop it.
"""

from __future__ import annotations

import builtins
import inspect
import operator
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves

from strategies.errors import StrategyError
from strategies.fx.shadow import Shadow

CONSTANTS = (bool, int, float, complex, str, type(None), type(...), torch.dtype, torch.device)
"""Types that a graph holds as they are, beside tensors and lists, tuples, dictionaries and slices of these."""

_MORE_CONSTANTS = (*CONSTANTS, torch.layout, torch.memory_format, torch.finfo, torch.iinfo)
_QUERIES = frozenset(
    """size dim ndimension numel nelement stride element_size is_contiguous is_floating_point is_complex is_signed
    is_conj is_neg is_inference is_pinned is_tensor storage_offset get_device type __len__ __repr__ __format__ __hash__
    result_type promote_types can_cast is_grad_enabled is_autocast_enabled get_autocast_dtype get_default_dtype
    _set_grad_enabled is_same_size data_ptr untyped_storage _is_view is_shared has_names dim_order""".split()  # noqa: SIM905
)
"""Functions whose results follow from shapes and types, which are the same whenever the graph runs."""
_IN_PLACE_OPERATORS = frozenset(
    f"__{name}__"
    for name in (*"iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor".split(), "setitem")  # noqa: SIM905
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """The forward of one module, for inputs of one kind.

    Fields:
        graph: placeholders are the tensors among the inputs, in the order of `tree_leaves`; the output is a
            tuple of tensors. A submodule's call has `meta["fqn"]`, its plain FQN below the module, and
            `meta["call"]`, how many calls it had before; every node has its fake result in `meta["val"]`.
        outputs: the leaves of what forward returns; a tensor is its position in the graph's output.
        structure: of these leaves.
    """

    graph: fx.Graph
    outputs: tuple[Any, ...]
    structure: TreeSpec


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the output of a graph."""

    index: int


class Recorder(TorchFunctionMode):
    """Records the forward of a shadow's model.

    Args:
        shadow: of the module, with fake tensors.
        through: FQNs of the submodules that are looked into.
        name: of the module, for messages.
    """

    def __init__(self, shadow: Shadow, through: frozenset[str], name: str) -> None:
        super().__init__()
        self._shadow = shadow
        self._through = through
        self._name = name
        self._graph = fx.Graph()
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[Any] = []
        self._calls: Counter[str] = Counter()
        self._is_quiet = False
        self._context = _context()

    def record(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Recording:
        """Return what `scope.forward(*args, **kwargs)` does.

        Args:
            args: positional inputs, tensors of the shadow.
            kwargs: keyword inputs.

        Raises:
            StrategyError: forward does what a graph cannot hold; the message names it.
        """
        for name, tensor in _named_tensors(self._shadow.model, args, kwargs):
            self._own(tensor, self._graph.placeholder(name))
        self._shadow.listen(self)
        assert self._shadow.mode is not None
        try:
            with self._shadow.mode, self:
                leaves, structure = tree_flatten(self._shadow.model.forward(*args, **kwargs))
        finally:
            self._shadow.listen(None)
        return self._finished(leaves, structure)

    def called(self, module: nn.Module, body: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Return `body(*args, **kwargs)`, recorded as one call unless the module is looked into."""
        fqn = self._shadow.fqns[id(module)]
        if self._is_quiet or fqn in self._through:
            return body(*args, **kwargs)
        self._check_context(repr(fqn))
        node_args, node_kwargs = self._arguments(args, fqn), self._arguments(kwargs, fqn)
        self._is_quiet = True
        try:
            result = body(*args, **kwargs)
        finally:
            self._is_quiet = False
        node = self._graph.call_module(fqn, node_args, node_kwargs)
        node.meta |= {"fqn": fqn, "call": self._calls[fqn]}
        self._calls[fqn] += 1
        self._results(result, node, f"{fqn!r} returns")
        return result

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_quiet:
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        name = _name(func)
        has_tensors = any(isinstance(leaf, Tensor) for leaf in tree_leaves(result))
        if not has_tensors and name != "__setitem__":
            if name in _QUERIES or func.__name__ == "__get__":
                return result
            raise self._error(f"calls {name!r}, whose result depends on data or stays outside of a graph")
        self._check_context(repr(name))
        node = self._node_of(func, name, self._arguments(args, name), self._arguments(kwargs, name))
        node.meta["mutates"] = _mutated(func, name, node)
        self._results(result, node, f"{name!r} gives")
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
        if isinstance(value, tuple | list):
            held = [self._arguments(each, where) for each in value]
            return held if isinstance(value, list) else tuple(held)
        if isinstance(value, dict):
            return {key: self._arguments(each, where) for key, each in value.items()}
        if isinstance(value, slice):
            return slice(*(self._arguments(each, where) for each in (value.start, value.stop, value.step)))
        if type(value) in _MORE_CONSTANTS or isinstance(value, torch._ops.OpOverload):  # noqa: SLF001
            return value
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise self._error(f"gives {where!r} a number that depends on data")
        raise self._error(f"gives {where!r} a {type(value).__name__}, which no graph can hold")

    def _node(self, tensor: Tensor, where: str) -> fx.Node:
        if id(tensor) in self._nodes:
            return self._nodes[id(tensor)]
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
        node.meta["val"] = result
        if isinstance(result, Tensor):
            self._own(result, node)
            return
        if isinstance(result, Mapping):
            parts: list[tuple[Any, Any, Any]] = [
                (operator.getitem, key, part) for key, part in result.items()
            ]
        elif isinstance(result, tuple | list):
            parts = [(operator.getitem, index, part) for index, part in enumerate(result)]
        elif result is None:
            return
        else:
            raise self._error(
                f"cannot go on where {where} a {type(result).__name__}, which no graph can hold"
            )
        for function, key, part in parts:
            if part is not None:
                self._results(part, self._graph.call_function(function, (node, key)), where)

    def _own(self, tensor: Tensor, node: fx.Node) -> None:
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)  # an `id` is only its own while it lives
        node.meta["val"] = tensor

    def _finished(self, leaves: list[Any], structure: TreeSpec) -> Recording:
        outputs: list[Any] = []
        tensors: list[fx.Node] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                outputs.append(Position(len(tensors)))
                tensors.append(self._node(leaf, "output"))
            elif isinstance(leaf, CONSTANTS):
                outputs.append(leaf)
            else:
                raise self._error(f"returns a {type(leaf).__name__}, which no graph can hold")
        self._graph.output(tuple(tensors))
        for node in reversed(self._graph.nodes):
            if node.target is operator.getitem and not node.users:
                self._graph.erase_node(node)
        return Recording(graph=self._graph, outputs=tuple(outputs), structure=structure)

    def _check_context(self, what: str) -> None:
        if _context() == self._context:
            return
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 (who called is the question)
        while frame is not None and frame.f_code is not Recorder.record.__code__:
            if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
                problem = f"calls {what} inside torch.utils.checkpoint"
                raise self._error(f"{problem}; take that call out and label what it held, regions replace it")
            frame = frame.f_back
        raise self._error(
            f"calls {what} under its own grad mode, autocast or saved-tensor hooks; put that part into a module"
        )

    def _error(self, problem: str) -> StrategyError:
        return StrategyError("ac", f"{self._name} {problem}")


def _named_tensors(
    scope: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    signature = inspect.signature(scope.forward)
    names = list(signature.parameters)
    given = [*zip([*names, *["inputs"] * len(args)], args, strict=False), *kwargs.items()]
    for name, value in given:
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        yield from ((name, tensor) for tensor in tensors)


def _name(func: Any) -> str:
    if func.__name__ not in {"__get__", "__set__"}:
        return str(func.__name__)
    descriptor = func.__self__
    owner = descriptor.fget if isinstance(descriptor, property) else descriptor
    return str(owner.__name__)


def _mutated(func: Any, name: str, node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the nodes whose tensors a call changes in place."""
    given: Mapping[str, Any] = node.kwargs
    if inspect.isfunction(func):  # `functional.relu(x, True)`
        given = inspect.signature(func).bind(*node.args, **node.kwargs).arguments
    is_in_place = name.endswith("_") and not name.endswith("__")
    is_in_place = is_in_place or name in _IN_PLACE_OPERATORS or given.get("inplace") is True
    mutated = node.all_input_nodes[:1] if is_in_place else []
    out = given.get("out")
    return (*mutated, out) if isinstance(out, fx.Node) else tuple(mutated)


def _context() -> tuple[Any, ...]:
    """Return what decides, beside its inputs, what an operator does and what autograd keeps of it."""
    devices = ("cpu", "cuda")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        tuple((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices),
        torch._C._autograd._top_saved_tensors_default_hooks(True),  # noqa: SLF001 (no public way to see them)
    )
