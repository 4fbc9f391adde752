"""Batch flow: whether a model can run on a part of its batch at a time, and whether it then does the same.

A model may run in chunks of its batch where a chunk of every result follows from chunks of inputs, through
all of its scopes. That is read off the graphs of the whole batch. Python may still do something else for a
part, as a division by the number of samples. So the graphs of a part, too, must be those of the whole with
fewer samples.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from strategies.chunk.flow.axes import Axis, whole
from strategies.chunk.flow.chunk_rules import FACTORIES, SHAPED, inputs_for, is_random, shape_of, slots
from strategies.estimate.liveness import key_of
from strategies.estimate.operator_cost import tensors_of
from strategies.tracing.channel_norms import whole_norms
from strategies.tracing.scope_graph import ScopeGraph, is_opaque

_aten = torch.ops.aten
_RESHAPES = frozenset(
    {
        _aten.clone.default,
        _aten.contiguous.default,
        _aten.view.default,
        _aten._unsafe_view.default,  # noqa: SLF001 (its name)
        _aten.reshape.default,
        _aten.unsqueeze.default,
    }
)
"""Operators that keep the elements of their input in order."""


class _Meets(Exception):  # noqa: N818 (no error)
    """Samples meet, or something is done for the whole batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchFlow:
    """The way of a batch through a model.

    Fields:
        cuts: for each tensor input of the model, whether a chunk takes a part of it.
        axes: by scope in the order of their graphs, the axis of each value that a result follows from; `None`
            for one that is whole.
    """

    size: int
    cuts: tuple[bool, ...]
    axes: tuple[Mapping[fx.Node, Axis | None], ...]

    @classmethod
    def of(cls, graphs: Sequence[ScopeGraph]) -> BatchFlow | None:
        """Return the flow of a model, `None` where its samples meet, or it may not run twice.

        Args:
            graphs: graphs of the scopes, inner ones first, the model's last, recorded without gradients.
        """
        root = graphs[-1].graph
        results = _results(root)
        if not _may_repeat(graphs) or not results or not all(each.meta["val"].dim() for each in results):
            return None
        size = shape_of(results[0])[0]
        calls = [node for node in root.nodes if node.op == "call_module"]
        inner = dict(zip(calls, graphs[:-1], strict=True))
        axes: dict[fx.Graph, Mapping[fx.Node, Axis | None]] = {}
        try:
            demands = _Demands(root, {call: scope.graph for call, scope in inner.items()}, axes)
            found = demands.of({at: whole(0, shape_of(each)) for at, each in enumerate(results)})
        except _Meets:
            return None
        taken = [axis for axis in found.values() if axis is not None]
        if size < 2 or not taken or any(axis != Axis(0, 1, size) for axis in taken):  # noqa: PLR2004 (nothing to cut)
            return None
        return cls(
            size=size,
            cuts=tuple(found.get(at) is not None for at, _ in enumerate(root.find_nodes(op="placeholder"))),
            axes=tuple(axes[scope.graph] for scope in graphs),
        )

    @staticmethod
    def results(graphs: Sequence[ScopeGraph]) -> list[Tensor]:
        """Return the results of the model, without data."""
        return [node.meta["val"] for node in _results(graphs[-1].graph)]

    def is_kept_by(self, graphs: Sequence[ScopeGraph], parts: Sequence[ScopeGraph], length: int) -> bool:
        """Return whether the forward of `length` samples is that of all with fewer of them.

        Args:
            graphs: graphs of the whole batch.
        """
        return len(graphs) == len(parts) and all(
            _Alike(whole_, part, axes, length).holds()
            for whole_, part, axes in zip(graphs, parts, self.axes, strict=True)
        )


def _results(graph: fx.Graph) -> Sequence[fx.Node]:
    found: Any = next(node for node in reversed(graph.nodes) if node.op == "output").args[0]
    results: Sequence[fx.Node] = found
    return results


def _may_repeat(graphs: Sequence[ScopeGraph]) -> bool:
    """Return whether nothing is drawn, written in place, opaque, or given back as it came."""
    for node in (node for scope in graphs for node in scope.graph.nodes):
        if node.op == "call_module":
            if is_opaque(node):
                return False
        elif node.meta.get("written", False) or (node.op == "call_function" and is_random(node)):
            return False
    root = graphs[-1].graph
    given = {
        key_of(each)
        for node in root.nodes
        if node.op in {"placeholder", "get_attr"}
        for each in tensors_of(node)
    }
    made = [key_of(node.meta["val"]) for node in _results(root)]
    return len(set(made)) == len(made) and given.isdisjoint(made)


class _Demands:
    """The axes that the results of a graph demand of its values and inputs.

    Args:
        inner: graphs of the scopes that it calls, by call.
        axes: takes the axes of the values of each graph.
    """

    def __init__(
        self,
        graph: fx.Graph,
        inner: Mapping[fx.Node, fx.Graph],
        axes: dict[fx.Graph, Mapping[fx.Node, Axis | None]],
    ) -> None:
        self._graph = graph
        self._inner = inner
        self._axes = axes
        self._wanted: dict[fx.Node, Axis | None] = {}
        self._parts: dict[fx.Node, dict[int, Axis | None]] = {}

    def of(self, results: Mapping[int, Axis | None]) -> dict[int, Axis | None]:
        """Return the axes of the inputs, by number, that make results of these axes, by number.

        What is not read is not among them.

        Raises:
            _Meets: there are none.
        """
        self._axes[self._graph] = self._wanted
        for at, axis in results.items():
            self._want(_results(self._graph)[at], axis)
        for node in reversed(self._graph.nodes):
            if node in self._parts:
                self._pass(node, self._parts[node])
            elif node in self._wanted:
                self._pass(node, {0: self._wanted[node]})
        given = self._graph.find_nodes(op="placeholder", sort=True)
        return {at: self._wanted[node] for at, node in enumerate(given) if node in self._wanted}

    def _want(self, node: fx.Node, axis: Axis | None) -> None:
        if self._wanted.setdefault(node, axis) != axis:
            raise _Meets

    def _pass(self, node: fx.Node, made: Mapping[int, Axis | None]) -> None:
        """Demand of the inputs of a node what its results, by number, are made of."""
        if node.op in {"placeholder", "get_attr"}:
            if node.op == "get_attr" and made[0] is not None:
                raise _Meets
            return
        if node.target is operator.getitem:
            self._want_part(node, made[0])
            return
        for at, axis in self._inputs(node, made).items():
            self._want(slots(node)[at], axis)

    def _want_part(self, node: fx.Node, axis: Axis | None) -> None:
        """Demand a part of the results of the operator, or of the scope, that has made it."""
        maker: Any
        maker, position = node.args
        while maker.target is operator.getitem:
            maker = maker.args[0]
        if maker.op == "call_module":
            leaves = [id(each) for each in tree_leaves(maker.meta["val"]) if isinstance(each, Tensor)]
            position = leaves.index(id(node.meta["val"]))
        self._parts.setdefault(maker, {})[position] = axis  # type: ignore[index]

    def _inputs(self, node: fx.Node, made: Mapping[int, Axis | None]) -> Mapping[int, Axis | None]:
        if node.op == "call_module":
            return _Demands(self._inner[node], {}, self._axes).of(made)
        if set(made.values()) == {None}:
            return dict.fromkeys(range(len(slots(node))))
        index, axis = next((index, axis) for index, axis in made.items() if axis is not None)
        found = inputs_for(node, index, axis)
        if found is None or any(found[1][at] != each for at, each in made.items()):
            raise _Meets
        return dict(enumerate(found[0]))


class _Step(NamedTuple):
    """An operator, whatever copies and reshapes lie between it and others.

    Fields:
        target: the operator; a group norm is one, in passes or not.
        arguments: what it takes, values by number, without sizes that follow from the shape of its result.
        sources: tensors among its inputs.
    """

    node: fx.Node
    target: Any
    arguments: Any
    sources: Sequence[fx.Node]


@dataclass(frozen=True, slots=True)
class _Alike:
    """The graph of a scope for the whole batch, and that for a chunk.

    Fields:
        axes: axes of values of the former.
    """

    graph: ScopeGraph
    part: ScopeGraph
    axes: Mapping[fx.Node, Axis | None]
    length: int

    def holds(self) -> bool:
        """Return whether both do the same; which layouts and shapes lie between two operators is left out."""
        ours, theirs = list(_steps(self.graph.graph)), list(_steps(self.part.graph))
        return len(ours) == len(theirs) and all(map(self._is_alike, ours, theirs))

    def _is_alike(self, step: _Step, other: _Step) -> bool:
        """Return whether two steps are of one operator, which takes a chunk in the second and makes one."""
        if step.node.op != other.node.op or step.target != other.target or step.arguments != other.arguments:
            return False
        if step.node.op == "get_attr" and step.target in self.graph.constants:
            return self._is_one_constant(str(step.target))
        sources = zip(step.sources, other.sources, strict=True)
        return all(self._is_chunk(*pair) for pair in ((step.node, other.node), *sources))

    def _is_chunk(self, node: fx.Node, other: fx.Node) -> bool:
        """Say if the second value has the shape of a chunk of the first, where a result follows from it."""
        value, chunk = node.meta.get("val"), other.meta.get("val")
        if node not in self.axes or not isinstance(value, Tensor):
            return True
        axis, shape = self.axes[node], list(value.shape)
        if axis is not None:
            shape = axis.chunk_shape(value.shape, axis.factor(value.shape) * self.length)
        return isinstance(chunk, Tensor) and chunk.dtype == value.dtype and list(chunk.shape) == shape

    def _is_one_constant(self, name: str) -> bool:
        one, other = self.graph.constants[name], self.part.constants.get(name)
        return other is not None and one.dtype == other.dtype and one.equal(other)


def _steps(graph: fx.Graph) -> Iterator[_Step]:
    numbers: dict[fx.Node, int] = {}
    found = count()
    norms = whole_norms(set(graph.nodes))
    passes = frozenset().union(*norms.values())
    for node in graph.nodes:
        if node in passes:
            continue
        if node.target in _RESHAPES or _is_of_norm(node):
            numbers[node] = numbers[node.args[0]]
            continue
        target, args, sources = _norm_in_passes(node) if node in norms else _operator(node)
        given = fx.map_arg((args, dict(node.kwargs)), lambda each: ("value", numbers[each]))
        numbers[node] = next(found)
        yield _Step(node, target, given, sources)


def _is_of_norm(node: fx.Node) -> bool:
    if node.target is not operator.getitem or node.args[1] != 0:
        return False
    return node.all_input_nodes[0].target is _aten.native_group_norm.default


def _operator(node: fx.Node) -> tuple[Any, list[Any], Sequence[fx.Node]]:
    """Return operator, arguments and tensors among the inputs of a node."""
    args = list(node.args)
    if node.target is _aten.native_group_norm.default:
        del args[3]
    elif node.target in SHAPED:
        del args[1]
    elif node.target in FACTORIES:
        del args[0]
    return node.target, args, slots(node)


def _norm_in_passes(node: fx.Node) -> tuple[Any, list[Any], Sequence[fx.Node]]:
    """Return the same of the last pass of a group norm, as of the operator that does all of them."""
    x, scales = slots(node)
    _, weight, bias, count, n_groups, eps, _ = scales.args
    given = [x, weight, bias, shape_of(x)[1], count, n_groups, eps]
    return _aten.native_group_norm.default, given, [each for each in given if isinstance(each, fx.Node)]
