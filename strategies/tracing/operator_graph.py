"""Operator graphs: a model's forward as graphs of ATen operators, one graph a scope.

A scope is a module whose forward is a graph of its own: the model, and its blocks. In the graph of the model
a block is one call, so that the block's hooks (FSDP's among them), and regions around it, stay as they are.

A part that does what no graph would repeat, as a custom autograd function or a counter, is opaque: one call
of its module, which runs as it is.

The forward runs as Python on a shadow without memory, below autograd, where composite operators are gone and
autocast has written its casts down. In-place operators on a tensor that only its writer knows become their
functional forms, and what needs only the shape of a tensor no longer takes the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
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
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from strategies.base import StrategyError
from strategies.estimate.liveness import Key, key_of
from strategies.estimate.operator_cost import tensors_of
from strategies.tracing.channel_norms import norm_applied, norm_scales, norm_sums
from strategies.tracing.equal_views import merge_equal_views
from strategies.tracing.following import as_with_data
from strategies.tracing.guard import attribute_of_a_tensor, kind_of_result
from strategies.tracing.module_state import CONSTANTS, SideEffects
from strategies.tracing.operator_forms import (
    CREATES_EMPTY,
    depends_on_data,
    has_passes,
    is_alone,
    is_impure,
    positional_defaults,
    put_on_new_memory,
    storages_written,
    without_shapes_of,
)
from strategies.tracing.recorder import OF_CALLS, Frame
from strategies.tracing.scope_graph import OpaquePart, ScopeGraph, is_within
from strategies.tracing.shadow import Shadow
from strategies.tracing.without_data import line_of, words_of

_aten = torch.ops.aten
_ALIASES = frozenset({_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default})
_EMPTIES = CREATES_EMPTY | {_aten.empty.memory_format, _aten.empty_strided.default}
_REMEDY = "move the call out of the model, or use chunk=none"
_NLL_LOSSES = frozenset({_aten.nll_loss_forward.default, _aten.nll_loss2d_forward.default})


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """The forward of a model as graphs.

    Fields:
        graphs: graph of each call of a scope, inner ones first, the model itself last.
        opaque: FQNs of the modules that run as they are, with the reason.
    """

    graphs: list[ScopeGraph]
    opaque: Mapping[str, str]


def record(
    cast: Callable[[], tuple[Shadow, tuple[Any, ...], Mapping[str, Any]]],
    scopes: frozenset[str],
    opaque: Mapping[str, str],
    *,
    where: str = "chunk",
    forward: Callable[[nn.Module], Callable[..., Any]] | None = None,
) -> Recorded:
    """Return the graphs of a forward, in which as little as possible is opaque.

    Args:
        cast: makes a shadow of the model, with fake tensors, and its inputs, positional and by keyword.
        opaque: FQNs of modules that are known to be opaque, with the reason.
        where: configuration path that messages name.
        forward: makes of the shadow of the model what runs on the inputs; `None`: its forward.

    Raises:
        StrategyError: forward depends on data, an operator cannot run without it, or the model itself does
            what a graph would not repeat; the message names it.
    """
    found = dict(opaque)
    while True:
        shadow, args, kwargs = cast()
        found |= dict.fromkeys(_recurrent(shadow.model), "is a recurrent layer")
        cut = frozenset(fqn for fqn in scopes if not is_within(fqn, found))
        run = None if forward is None else forward(shadow.model)
        known = frozenset(found)
        once = partial(record_scopes, shadow, cut, args, kwargs, opaque=known, where=where, forward=run)
        try:
            return Recorded(graphs=_forgiven(once), opaque=found)
        except OpaquePart as part:
            fqn = part.fqn
            while fqn in found:  # what does it stands around the part
                fqn = fqn.rpartition(".")[0]
            if not fqn:
                raise
            found[fqn] = part.problem


def _forgiven(record_once: Callable[[], list[ScopeGraph]]) -> list[ScopeGraph]:
    """Return the graphs; what a module does in its first call alone is forgiven if it changes no graph."""
    try:
        return record_once()
    except OpaquePart as part:
        if not part.graphs:
            raise
        try:
            graphs = record_once()
        except StrategyError:
            raise part from None
        if list(map(_text, graphs)) != list(map(_text, part.graphs)):
            raise
        return graphs


def _recurrent(model: nn.Module) -> list[str]:
    """Return the FQNs of the layers that are one kernel, or thousands of operators."""
    return [fqn for fqn, module in model.named_modules() if fqn and isinstance(module, nn.RNNBase)]


def _text(scope: ScopeGraph) -> str:
    return f"{scope.fqn} {scope.graph} {scope.outputs}"


def record_scopes(
    shadow: Shadow,
    scopes: frozenset[str],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    opaque: frozenset[str] = frozenset(),
    where: str = "chunk",
    forward: Callable[..., Any] | None = None,
) -> list[ScopeGraph]:
    """Return the graph of each call of a scope, inner ones first, the model itself last.

    Args:
        shadow: shadow of the model, with fake tensors.
        args, kwargs: inputs of the model, tensors of the shadow.
        opaque: FQNs of the modules whose calls are one node each.
        where: configuration path that messages name.
        forward: what runs on the inputs; `None`: forward of the shadow.

    Raises:
        OpaquePart: a module does what a graph would not repeat; the message names it.
        StrategyError: forward depends on data, or an operator cannot run without it.
    """
    recorder = _OperatorRecorder(shadow, scopes, opaque, where)
    try:
        with (
            shadow.listening(recorder),
            _without_autocast_cache(),
            as_with_data(),
            recorder,
            recorder.frame("", args, kwargs),
        ):
            recorder.begin()
            recorder.finish_model((forward or shadow.model.forward)(*args, **kwargs))
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise recorder.unplannable(error.func, "whose result or shape depends on data", error) from error
    except UnsupportedOperatorException as error:
        raise recorder.unplannable(error.func, "which does not run without data", error) from error
    except (RuntimeError, TypeError) as error:
        raise recorder.unfollowable(error) from error
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
    def __init__(self, shadow: Shadow, scopes: frozenset[str], opaque: frozenset[str], where: str) -> None:
        super().__init__()
        self.graphs: list[ScopeGraph] = []
        self._shadow = shadow
        self._scopes = scopes
        self._opaque = opaque
        self._is_inside_opaque = False
        self._of_opaque: dict[int, Tensor] = {}
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

    def unplannable(self, func: Any, reason: str, error: Exception | None = None) -> StrategyError:
        """Return the refusal of an operator that the running module calls; `error` says where."""
        return self._error(
            f"{self.place} calls {func}{line_of(error)}, {reason}; it cannot be planned; {_REMEDY}"
        )

    def unfollowable(self, error: Exception) -> StrategyError:
        """Return the refusal of a module that raises an error, which it may not do with data."""
        said = words_of(error)
        where = f"{self.place} cannot be followed without data{line_of(error)}"
        return self._error(f"{where}, where it raises {said}; {_REMEDY}")

    def mark_written(self) -> None:
        """Mark the nodes on storages that are written in place: what chunks make would miss the write."""
        for scope in self.graphs:
            for node in scope.graph.nodes:
                node.meta["written"] = not self._written.isdisjoint(map(key_of, tensors_of(node)))
            merge_equal_views(scope.graph)

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
        self.finish(result)
        fqn, effect = next(self._effects.changes(""), ("", self._effects.found("")))
        if effect is not None:
            owner = repr(fqn) if fqn else self.place
            problem = f"{owner} {effect}, which a planned forward would not repeat; return it instead"
            self.mark_written()
            raise OpaquePart(self._where, problem, fqn, self.graphs)

    def finish(self, result: Any) -> None:
        """Take what the forward of the innermost scope returns."""
        frame = self._frames[-1]
        leaves, structure = tree_flatten(result)
        name = attribute_of_a_tensor(leaves)
        if name is not None:
            problem = f"{frame.fqn or 'the model'!r} returns a tensor with the attribute {name!r}"
            raise self._error(f"{problem}, which no graph can hold; return it beside the tensor")
        outputs, output = frame.finish(
            leaves, self._node, lambda problem: self._error(f"{frame.fqn or 'the model'} {problem}")
        )
        output.meta["has_gradients"] = self._has_gradients
        _drop_internal_detaches(frame)
        frame.graph.eliminate_dead_code(is_impure)
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

        An inner scope's result depends on what it reads, so what an outer scope does depends on that, too.
        What an opaque module reads is its own: it runs as it is.
        """
        fqn = self._shadow.fqns[id(module)]
        if self._is_inside_opaque or (fqn in self._scopes and name in OF_CALLS):
            return  # a scope is called as it is
        for frame in self._frames:
            prefix = f"{frame.fqn}." if frame.fqn else ""
            if fqn == frame.fqn or fqn.startswith(prefix):
                frame.note_read("" if fqn == frame.fqn else fqn.removeprefix(prefix), name)

    def called(self, module: nn.Module, body: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Return `body(*args, **kwargs)`; the call of a scope is one node of the scope around it."""
        fqn = self._shadow.fqns[id(module)]
        if self._is_inside_opaque:
            return body(*args, **kwargs)
        self._refuse_functions((args, kwargs))
        self._modules.append(fqn)
        if isinstance(module, nn.TransformerEncoder) and _leaves_padding_out(module, *args, **kwargs):
            raise self._error(
                f"{self.place} leaves padding out in a path of nested tensors, which has no shapes to plan "
                "with; make it with enable_nested_tensor=False"
            )
        if fqn in self._opaque:
            result = self._call_opaque(fqn, body, args, kwargs)
        elif fqn not in self._scopes or fqn == self._frames[-1].fqn or not _is_held((args, kwargs)):
            result = body(*args, **kwargs)
        else:
            result = self._call_scope(fqn, body, args, kwargs)
        self._refuse_functions(result)
        self._modules.pop()
        return result

    def _refuse_functions(self, value: Any) -> None:
        """Refuse what a custom autograd function of the running module has made."""
        for tensor in tree_leaves(value):
            if not isinstance(tensor, Tensor) or id(tensor) in self._of_opaque:
                continue
            if isinstance(tensor.grad_fn, BackwardCFunction):
                name = type(tensor.grad_fn).__name__.removesuffix("Backward")
                raise self._opaque_part(
                    f"calls the custom autograd function {name!r}, whose backward would be lost: chunks are "
                    "recomputed from the forward graph; rewrite it with torch operators, or use chunk=none"
                )

    def _opaque_part(self, problem: str) -> OpaquePart:
        """Return the error of the running module, which may run as it is."""
        return OpaquePart(self._where, f"{self.place} {problem}", self._modules[-1] if self._modules else "")

    def _call_opaque(self, fqn: str, body: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        given = self._given(args, kwargs)
        self._is_inside_opaque = True
        result = body(*args, **kwargs)
        self._is_inside_opaque = False
        self._effects.forgive(fqn)
        leaves = tree_leaves(result)
        is_plain = _is_held((args, kwargs)) and attribute_of_a_tensor(leaves) is None
        if not is_plain or not all(isinstance(leaf, Tensor | None) for leaf in leaves):
            raise self._opaque_part("takes or returns what is no tensor, and cannot run as it is")
        node = self._call_node(fqn, given, result)
        node.meta["opaque"] = True
        self._of_opaque |= {id(leaf): leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        return result

    def _given(self, args: tuple[Any, ...], kwargs: Any) -> tuple[Any, Any]:
        """Return what a module is called with, nodes in the place of tensors."""
        packed = next((each for each in (*args, *kwargs.values()) if isinstance(each, PackedSequence)), None)
        if packed is not None:  # it asks its tensors where they are
            raise self._opaque_part("takes a packed sequence, which no graph can hold; pad it")
        given: tuple[Any, Any] = tree_map_only(Tensor, self._node, (args, kwargs))
        return given

    def _call_node(self, fqn: str, given: tuple[Any, Any], result: Any) -> fx.Node:
        outer = self._frames[-1]
        node = outer.graph.call_module(fqn.removeprefix(f"{outer.fqn}.") if outer.fqn else fqn, *given)
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        node.meta["autocast"] = {kind: torch.get_autocast_dtype(kind) for kind in kinds}
        node.meta["detached"] = self._has_gradients and not torch.is_grad_enabled()
        node.meta["returns"] = kind_of_result(result)
        self._own_results(result, node)
        node.meta["standing"] = self._standing.intersection(map(key_of, tensors_of(node)))
        return node

    def _call_scope(self, fqn: str, body: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run a scope as a graph of its own, and enter its call as one node."""
        given = self._given(args, kwargs)
        with self.frame(fqn, args, kwargs):
            result = body(*args, **kwargs)
            self.finish(result)
        self._call_node(fqn, given, result)
        return result

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an ATen operator and enter it, in its functional form where nobody can tell the two apart."""
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        if self._is_inside_opaque:
            self._written |= storages_written(func, args, kwargs)
            return func(*args, **kwargs)
        self._refuse_call(func, args, kwargs)
        if func in _NLL_LOSSES and args[3] != 0:
            return self._by_rows(func, args)
        functional = self._functional(func, args) if func._schema.is_mutable else None  # noqa: SLF001 (no public name)
        if functional is not None:
            put_on_new_memory(args[0], self._node(args[0]))
        elif not self._fills(func, args):
            self._written |= storages_written(func, args, kwargs)
        result = func(*args, **kwargs)
        if any(isinstance(each, Tensor) and each.is_nested for each in tree_leaves(result)):
            problem = f"{self.place} makes a nested tensor{line_of()}, which no graph can hold"
            raise self._error(f"{problem}; pad it")
        if func in _ALIASES:
            self._enter_alias(func, args[0], result, self._frames[-1])
        else:
            target, args, options = without_shapes_of(func, args, kwargs, result)
            if functional is not None:
                args = (*args, *positional_defaults(func)[len(args) :])
            self._enter_operator(functional or target, args, dict(options), result)
            if func is _aten.native_group_norm.default and not self._has_gradients:
                self._enter_passes(args, result[0])
        return result

    def _refuse_call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if depends_on_data(func, args):
            raise self.unplannable(func, "whose result or shape depends on data")
        if any(isinstance(leaf, torch.Generator) for leaf in tree_leaves((args, kwargs))):
            problem = f"calls {func}{line_of()} with a generator of its own, which no graph can hold"
            raise self._opaque_part(f"{problem}; let it draw from torch's own")

    def _error(self, problem: str) -> StrategyError:
        return StrategyError(self._where, problem)

    def _enter_operator(self, target: Any, args: Any, options: dict[str, Any], result: Any) -> None:
        graph = self._frames[-1].graph
        node = graph.call_function(target, *tree_map_only(Tensor, self._node, (args, options)))
        node.meta["module"] = self._modules[-1] if self._modules else ""
        self._own_results(result, node, is_detached=self._is_cut_off(args, options))

    def _is_cut_off(self, args: Any, options: Any) -> bool:
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

    def _enter_passes(self, args: tuple[Any, ...], result: Tensor) -> None:
        """Record a group norm as sums of channels and what follows from them, so that rows can be chunked."""
        x, weight, bias, *_, count, n_groups, eps = args
        if not has_passes(x, weight, bias):
            return

        def run(func: Any, *args: Any) -> Tensor:
            made: Tensor = func(*args)
            self._enter_operator(func, args, {}, made)
            return made

        node = self._node(x)
        is_joined = node.target is _aten.cat.default and node.args[1:] == (1,)
        parts = [each.meta["val"] for each in node.args[0]] if is_joined else [x]  # type: ignore[union-attr]
        sums = [run(norm_sums, part) for part in parts]
        whole = sums[0] if len(sums) == 1 else run(_aten.cat.default, sums, 2)
        scales = run(norm_scales, whole, weight, bias, count, n_groups, eps, x.dtype)
        self._enter_operator(norm_applied, (x, scales), {}, result)

    def _enter_alias(self, func: Any, source: Tensor, result: Tensor, frame: _ScopeFrame) -> None:
        node = self._node(source)
        if func is _aten.detach.default and torch.is_grad_enabled():
            node = frame.graph.call_function(func, (node,))
            frame.detached.append((node, result))
        frame.own(result, node)

    def _fills(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Say if `func` draws what an empty tensor of its own layout holds, before anybody reads it."""
        if func is not _aten.bernoulli_.float:
            return False
        node = self._frames[-1].nodes.get(id(args[0]))
        return node is not None and node.target in _EMPTIES and not node.users

    def _functional(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Return the operator that gives what the in-place `func` writes, if nobody can tell them apart."""
        name = func._schema.name.removeprefix("aten::")  # noqa: SLF001
        packet = getattr(_aten, name.removesuffix("_"), None) if name.endswith("_") else None
        overloads = {"default": "p", "float": "p"} if name == "bernoulli_" else {}
        overload = getattr(packet, overloads.get(func._overloadname, func._overloadname), None)  # noqa: SLF001
        written = args[0]
        node = self._frames[-1].nodes.get(id(written))
        if overload is None or node is None or node.op != "call_function" or not is_alone(written, node):
            return None
        if overload is _aten.bernoulli.p and not written.is_contiguous():
            return None  # it draws row by row, and in place in the order of memory
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
        self._refuse_functions(tensor)
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


def _leaves_padding_out(
    encoder: nn.TransformerEncoder,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> bool:
    """Return whether torch's encoder returns zeros for padding: without gradients and in evaluation."""
    is_plain = mask is None and not is_causal and not encoder.training and not torch.is_grad_enabled()
    return is_plain and encoder.use_nested_tensor and src_key_padding_mask is not None and src.dim() > 0


def _is_held(arguments: Any) -> bool:
    """Say if a graph can write down a call with these arguments: tensors without attributes, and constants.

    Of containers, it writes down tuples, lists and dictionaries.
    """
    leaves = tree_leaves(arguments, is_leaf=lambda each: not isinstance(each, tuple | list | dict))
    is_known = all(isinstance(leaf, (Tensor, *CONSTANTS)) for leaf in leaves)
    return is_known and attribute_of_a_tensor(leaves) is None


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Let each use of a weight have its own cast: scopes share no cast."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _drop_internal_detaches(frame: _ScopeFrame) -> None:
    """Take out the copies of tensors that autograd makes of views; the user's own `detach` stays."""
    for node, result in frame.detached:
        (source,) = node.all_input_nodes
        if result.requires_grad or not source.meta["val"].requires_grad:
            node.replace_all_uses_with(source)
