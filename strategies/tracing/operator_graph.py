"""Operator graphs: a model's forward as graphs of ATen operators, one graph a scope.

A scope is a module whose forward is a graph of its own: the model, and its blocks. In the graph of the model
a block is one call, so that the block's hooks (FSDP's among them), and regions around it, stay as they are.

The forward runs as Python on a shadow without memory, below autograd, where composite operators are gone and
autocast has written its casts down. In-place operators on a tensor that only its writer knows become their
functional forms, and what needs only the shape of a tensor no longer takes the tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only

from strategies.errors import StrategyError
from strategies.estimate.liveness import Key, key_of
from strategies.estimate.operator_cost import is_view, tensors_of
from strategies.tracing.guard import kind_of_result
from strategies.tracing.module_state import CONSTANTS, SideEffects
from strategies.tracing.recorder import OF_CALLS, Frame
from strategies.tracing.shadow import Shadow

_aten = torch.ops.aten
_ALIASES = frozenset({_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default})
_FILLS = {
    _aten.zeros_like.default: 0,
    _aten.new_zeros.default: 0,
    _aten.ones_like.default: 1,
    _aten.new_ones.default: 1,
}
_EMPTY = frozenset({_aten.empty_like.default, _aten.new_empty.default, _aten.new_empty_strided.default})
_FULL = frozenset({_aten.full_like.default, _aten.new_full.default})
_NLL_LOSSES = frozenset({_aten.nll_loss_forward.default, _aten.nll_loss2d_forward.default})
_MASKS = frozenset({torch.bool, torch.uint8})


@dataclass(frozen=True, kw_only=True, slots=True)
class ScopeGraph:
    """The forward of one scope, for inputs of one kind.

    Fields:
        fqn: FQN of the scope in the model, `""` for the model itself.
        graph: placeholders are the tensors among the inputs; `get_attr` reads a parameter or buffer below the
            scope, or one of `constants`; `call_module` calls an inner scope by its FQN below the scope, with
            autocast as `meta["autocast"]` says, and without gradients where `meta["detached"]` does;
            `meta["standing"]` has the storages of its results that are no new ones, and `meta["returns"]` the
            kind of its result; the rest are ATen operators. Each node has its fake result in `meta["val"]`;
            `meta["written"]` says that one of them writes in place to memory that the result lies on.
            `meta["has_gradients"]` of the output says that forward ran with gradients on.
        outputs: leaves of the return value; a tensor is its `OutputIndex`.
        structure: tree structure of these leaves.
        constants: tensors that forward has made of Python values, by the name of their `get_attr`.
        reads: FQN, relative to the scope, and attribute of everything that forward read of modules, inner
            scopes included.
    """

    fqn: str
    graph: fx.Graph
    outputs: tuple[Any, ...]
    structure: TreeSpec
    constants: Mapping[str, Tensor]
    reads: tuple[tuple[str, str], ...]


def record_scopes(
    shadow: Shadow,
    scopes: frozenset[str],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    where: str = "chunk",
    forward: Callable[..., Any] | None = None,
) -> list[ScopeGraph]:
    """Return the graph of each call of a scope, inner ones first, the model itself last.

    Args:
        shadow: shadow of the model, with fake tensors.
        scopes: FQNs of inner scopes.
        args, kwargs: inputs of the model, tensors of the shadow.
        where: configuration path that messages name.
        forward: what runs on the inputs; `None`: forward of the shadow.

    Raises:
        StrategyError: forward depends on data, an operator cannot run without it, or forward does what a
            graph would not repeat; the message names it.
    """
    recorder = _OperatorRecorder(shadow, scopes, where)
    try:
        with (
            shadow.listening(recorder),
            _without_autocast_cache(),
            recorder,
            recorder.frame("", args, kwargs),
        ):
            recorder.begin()
            recorder.finish_model((forward or shadow.model.forward)(*args, **kwargs))
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise recorder.unplannable(error.func, "whose result or shape depends on data") from error
    except UnsupportedOperatorException as error:
        raise recorder.unplannable(error.func, "which does not run without data") from error
    recorder.mark_written()
    return recorder.graphs


@dataclass(kw_only=True, slots=True)
class _ScopeFrame(Frame):
    """A scope whose forward is running.

    Fields:
        constants: tensors that forward has made of Python values, by name.
        detached: nodes of `detach`, each with its result.
    """

    constants: dict[str, Tensor] = field(default_factory=dict)
    detached: list[tuple[fx.Node, Tensor]] = field(default_factory=list)


class _OperatorRecorder(TorchDispatchMode):
    def __init__(self, shadow: Shadow, scopes: frozenset[str], where: str) -> None:
        super().__init__()
        self.graphs: list[ScopeGraph] = []
        self._shadow = shadow
        self._scopes = scopes
        self._where = where
        self._frames: list[_ScopeFrame] = []
        self._modules: list[str] = []
        self._written: set[Key] = set()
        self._has_gradients = torch.is_grad_enabled()
        self._effects = SideEffects({shadow.fqns[id(module)]: module for module in shadow.model.modules()})
        self._names: dict[int, list[str]] = {}
        self._standing: set[Key] = set()
        for fqn, module in shadow.model.named_modules(remove_duplicate=False):
            held = {**vars(module), **module._parameters, **module._buffers}  # noqa: SLF001 (both, by attribute)
            for name, value in held.items():
                if isinstance(value, Tensor):
                    self._standing.add(key_of(value))
                    self._names.setdefault(id(value), []).append(f"{fqn}.{name}".lstrip("."))

    @property
    def place(self) -> str:
        """The module that runs, for messages."""
        return repr(
            next((name for name in reversed(self._modules) if name), type(self._shadow.model).__name__)
        )

    def unplannable(self, func: Any, reason: str) -> StrategyError:
        """Return the refusal of an operator that the running module calls."""
        remedy = "move the call out of the model, or use chunk=none"
        return self._error(f"{self.place} calls {func}, {reason}; it cannot be planned; {remedy}")

    def mark_written(self) -> None:
        """Mark the nodes on storages that are written in place: what chunks make would miss the write."""
        for scope in self.graphs:
            for node in scope.graph.nodes:
                node.meta["written"] = not self._written.isdisjoint(map(key_of, tensors_of(node)))

    @contextmanager
    def frame(self, fqn: str, args: Any, kwargs: Any) -> Iterator[None]:
        """Record what follows as the forward of the scope `fqn`."""
        frame = _ScopeFrame(fqn=fqn)
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                frame.own(tensor, frame.graph.placeholder("x"))
        self._frames.append(frame)
        yield
        self._frames.pop()

    def begin(self) -> None:
        """Take a first look at what forward must leave as it is."""
        self._effects.forgive("")

    def finish_model(self, result: Any) -> None:
        """Take what the forward of the model returns, unless it has done more than that."""
        effect = self._effects.found("")
        if effect is not None:
            raise self._error(
                f"{self.place} {effect}, which a planned forward would not repeat; return it instead"
            )
        self.finish(result)

    def finish(self, result: Any) -> None:
        """Take what the forward of the innermost scope returns."""
        frame = self._frames[-1]
        leaves, structure = tree_flatten(result)
        outputs, output = frame.finish(
            leaves, self._node, lambda problem: self._error(f"{frame.fqn or 'the model'} {problem}")
        )
        output.meta["has_gradients"] = self._has_gradients
        _drop_internal_detaches(frame)
        frame.graph.eliminate_dead_code(_is_impure)
        for node in frame.graph.find_nodes(op="get_attr"):  # forward may have read it under another name
            if node.target not in frame.constants:
                fqn, _, name = str(node.target).rpartition(".")
                frame.note_read(fqn, name)
        self.graphs.append(
            ScopeGraph(
                fqn=frame.fqn,
                graph=frame.graph,
                outputs=outputs,
                structure=structure,
                constants=frame.constants,
                reads=tuple(frame.reads),
            )
        )

    def read(self, module: nn.Module, name: str) -> None:
        """Take note that the forwards of the running scopes read `module.name`.

        What an outer scope does follows from what an inner one returns, and so from what that reads.
        """
        fqn = self._shadow.fqns[id(module)]
        if fqn in self._scopes and name in OF_CALLS:
            return  # a scope is called as it is
        for frame in self._frames:
            prefix = f"{frame.fqn}." if frame.fqn else ""
            if fqn == frame.fqn or fqn.startswith(prefix):
                frame.note_read("" if fqn == frame.fqn else fqn.removeprefix(prefix), name)

    def called(self, module: nn.Module, body: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Return `body(*args, **kwargs)`; the call of a scope is one node of the scope around it."""
        fqn = self._shadow.fqns[id(module)]
        self._modules.append(fqn)
        if fqn not in self._scopes or fqn == self._frames[-1].fqn:
            result = body(*args, **kwargs)
        else:
            result = self._call_scope(fqn, body, args, kwargs)
        self._modules.pop()
        return result

    def _call_scope(self, fqn: str, body: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        outer = self._frames[-1]
        below = fqn.removeprefix(f"{outer.fqn}.") if outer.fqn else fqn
        given = tree_map_only(Tensor, self._node, (args, kwargs))
        with self.frame(fqn, args, kwargs):
            result = body(*args, **kwargs)
            self.finish(result)
        node = outer.graph.call_module(below, *given)
        node.meta["autocast"] = autocast_dtypes()
        node.meta["detached"] = self._has_gradients and not torch.is_grad_enabled()
        node.meta["returns"] = kind_of_result(result)
        self._own_results(result, node)
        node.meta["standing"] = self._standing.intersection(map(key_of, tensors_of(node)))
        return result

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        self._refuse_call(func, args, kwargs)
        if func in _NLL_LOSSES and args[3] != 0:
            return self._by_rows(func, args)
        functional = self._functional(func, args) if func._schema.is_mutable else None  # noqa: SLF001 (no public name)
        if functional is not None:
            _on_new_memory(args[0], self._node(args[0]))
        else:
            self._written |= _written_by(func, args, kwargs)
        result = func(*args, **kwargs)
        if func in _ALIASES:
            self._enter_alias(func, args[0], result, self._frames[-1])
        else:
            target, args, options = _without_shapes_of(func, args, kwargs, result)
            self._enter_operator(functional or target, args, dict(options), result)
        return result

    def _refuse_call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if _depends_on_data(func, args):
            raise self.unplannable(func, "whose result or shape depends on data")
        if any(isinstance(leaf, torch.Generator) for leaf in tree_leaves((args, kwargs))):
            problem = f"{self.place} calls {func} with a generator of its own, which no graph can hold"
            raise self._error(f"{problem}; let it draw from torch's own")

    def _error(self, problem: str) -> StrategyError:
        return StrategyError(self._where, problem)

    def _enter_operator(self, target: Any, args: Any, options: dict[str, Any], result: Any) -> None:
        graph = self._frames[-1].graph
        node = graph.call_function(target, *tree_map_only(Tensor, self._node, (args, options)))
        node.meta["module"] = self._modules[-1] if self._modules else ""
        self._own_results(result, node, is_detached=self._is_cut_off(args, options))

    def _is_cut_off(self, args: Any, options: Any) -> bool:
        """Whether forward itself has turned gradients off for what it calls."""
        if not self._has_gradients or torch.is_grad_enabled():
            return False
        return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves((args, options)))

    def _by_rows(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Record a reduced loss as one number a row, so that rows can be chunked, and their reduction."""
        scores, targets, weight, reduction, ignored = args

        def run(func: Any, *args: Any) -> Any:
            return self.__torch_dispatch__(func, (), args)

        rows, _ = run(func, scores, targets, weight, 0, ignored)
        total, counted = run(_aten.sum.default, rows), run(_aten.ne.Scalar, targets, ignored)
        if weight is not None:
            known = run(_aten.mul.Tensor, targets, counted)
            weights = run(_aten.index.Tensor, weight, [known])
            counted = run(_aten.mul.Tensor, weights, counted)
        count = run(_aten.sum.default, counted)
        is_mean = reduction == 1
        return run(_aten.div.Tensor, total, count) if is_mean else total, count

    def _enter_alias(self, func: Any, source: Tensor, result: Tensor, frame: _ScopeFrame) -> None:
        node = self._node(source)
        if func is _aten.detach.default and torch.is_grad_enabled():
            node = frame.graph.call_function(func, (node,))
            frame.detached.append((node, result))
        frame.own(result, node)

    def _functional(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Return the operator that gives what the in-place `func` writes, if nobody can tell them apart."""
        name = func._schema.name.removeprefix("aten::")  # noqa: SLF001
        packet = getattr(_aten, name.removesuffix("_"), None) if name.endswith("_") else None
        overloads = {"default": "p", "float": "p"} if name == "bernoulli_" else {}
        overload = getattr(packet, overloads.get(func._overloadname, func._overloadname), None)  # noqa: SLF001
        written = args[0]
        node = self._frames[-1].nodes.get(id(written))
        if overload is None or node is None or node.op != "call_function" or not _is_alone(written, node):
            return None
        return overload

    def _own_results(self, result: Any, node: fx.Node, *, is_detached: bool = False) -> None:
        frame = self._frames[-1]
        if isinstance(result, Tensor):
            node.meta.setdefault("val", result)
            if is_detached and not result.requires_grad:
                node = frame.graph.call_function(_aten.detach.default, (node,))
            frame.own(result, node)
            return
        node.meta["val"] = result
        for part, at in frame.parts(result or (), node, CONSTANTS):
            self._own_results(part, at, is_detached=is_detached)

    def _node(self, tensor: Tensor) -> fx.Node:
        frame = self._frames[-1]
        if isinstance(tensor.grad_fn, BackwardCFunction):
            name = type(tensor.grad_fn).__name__.removesuffix("Backward")
            raise self._error(
                f"{self.place} calls the custom autograd function {name!r}, whose backward would be lost: "
                "chunks are recomputed from the forward graph; rewrite it with torch operators, or use "
                "chunk=none"
            )
        if id(tensor) not in frame.nodes:
            frame.own(tensor, frame.graph.get_attr(self._attribute(tensor, frame)))
        return frame.nodes[id(tensor)]

    def _attribute(self, tensor: Tensor, frame: _ScopeFrame) -> str:
        """Return the name under which the scope holds a tensor that no operator of it has made."""
        names = self._names.get(id(tensor))
        prefix = f"{frame.fqn}." if frame.fqn else ""
        name = next((name for name in names or () if name.startswith(prefix)), None)
        if name is not None:
            return name.removeprefix(prefix)
        if names is not None or isinstance(tensor, FakeTensor | nn.Parameter):
            problem = (
                f"{frame.fqn or 'the model'!r} uses a tensor that comes neither from it nor from its inputs"
            )
            raise self._error(f"{problem}, in {self.place}; give it as an input")
        constant = f"_constant_{len(frame.constants)}"
        frame.constants[constant] = tensor
        return constant


def may_run_again(graph: fx.Graph) -> bool:
    """Whether a second run of the forward finds unchanged inputs and buffers: no operator writes to them."""
    given = (node for node in graph.nodes if node.op in {"placeholder", "get_attr"})
    return not any(node.meta["written"] for node in given)


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Let each use of a weight have its own cast: scopes share no cast."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def autocast_dtypes() -> dict[str, torch.dtype]:
    """Return the dtype that autocast gives operators, by type of the devices for which it is on."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return {kind: torch.get_autocast_dtype(kind) for kind in kinds}


def _depends_on_data(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether numbers or the shape of what `func` returns depend on data."""
    if func is _aten.index.Tensor:  # by positions it does not, whatever its tag says
        return any(isinstance(each, Tensor) and each.dtype in _MASKS for each in args[1])
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _written_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> set[Key]:
    """Return the storages that `func` writes to."""
    given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | dict(kwargs)  # noqa: SLF001 (no public name)
    writes = [each.name for each in func._schema.arguments if each.alias_info and each.alias_info.is_write]  # noqa: SLF001
    if given.get("training") is True:  # norms of batches do not say that they write
        writes += ["running_mean", "running_var"]
    return {
        key_of(leaf) for name in writes for leaf in tree_leaves(given.get(name)) if isinstance(leaf, Tensor)
    }


def _without_shapes_of(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
    """Return `func`, or a factory where it takes a tensor only for its shape."""
    if func not in _FILLS and func not in _EMPTY and func not in _FULL:
        return func, args, kwargs
    options = {"dtype": result.dtype, "device": result.device}
    if not result.is_contiguous():
        shape, strides = list(result.shape), list(result.stride())
        return _aten.empty_strided.default, (shape, strides), options
    if func in _EMPTY:
        return _aten.empty.memory_format, (list(result.shape),), options
    value = _FILLS[func] if func in _FILLS else args[2 if func is _aten.new_full.default else 1]
    return _aten.full.default, (list(result.shape), value), options


def _is_alone(tensor: Tensor, node: fx.Node) -> bool:
    """Whether `tensor`, which `node` made, lies on memory of its own and has no view."""
    storage = tensor.untyped_storage()._cdata  # noqa: SLF001 (its identity)

    def shares(value: Any) -> bool:
        return isinstance(value, Tensor) and value.untyped_storage()._cdata == storage  # noqa: SLF001

    maker = node.args[0] if node.target is operator.getitem else node
    assert isinstance(maker, fx.Node)
    others = (*maker.all_input_nodes, *node.users)
    return not is_view(maker) and not any(shares(other.meta.get("val")) for other in others)


def _on_new_memory(tensor: Tensor, node: fx.Node) -> None:
    """Leave the memory of `tensor` to `node`, which made it: the functional form of a write makes its own."""
    node.meta |= {"grad_fn": tensor.grad_fn, "requires_grad": tensor.requires_grad}
    node.meta["val"] = _aten.detach.default(tensor)
    if node.target is operator.getitem:
        maker, index = node.args
        parts = list(maker.meta["val"])  # type: ignore[union-attr]
        parts[index] = node.meta["val"]  # type: ignore[call-overload, index]
        maker.meta["val"] = tuple(parts)  # type: ignore[union-attr]
    with torch.no_grad():
        tensor.data = torch.empty_like(tensor)


def _drop_internal_detaches(frame: _ScopeFrame) -> None:
    """Take out the copies of tensors that autograd makes of views; the user's own `detach` stays."""
    for node, result in frame.detached:
        (source,) = node.all_input_nodes
        if result.requires_grad or not source.meta["val"].requires_grad:
            node.replace_all_uses_with(source)


def _is_impure(node: fx.Node) -> bool:
    if node.op in {"placeholder", "output", "call_module"}:
        return True
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    return bool(schema.is_mutable) or torch.Tag.nondeterministic_seeded in node.target.tags  # type: ignore[union-attr]
