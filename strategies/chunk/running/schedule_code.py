"""Schedules as code: one graph of operators, with each loop a module that holds the graph of its body."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from strategies.chunk.flow.axes import Axis
from strategies.chunk.flow.chunk_rules import (
    FACTORIES,
    SHAPED,
    groups_of,
    is_slice_along,
    slots,
    window_of,
)
from strategies.chunk.flow.row_window import ROWS
from strategies.chunk.loops.accumulating_products import known, product, unread_product
from strategies.chunk.loops.backward import differentiable, saved_storages, unread_loops
from strategies.chunk.loops.loop import ADDING, Loop, LoopInput, LoopOutput
from strategies.chunk.loops.read_again import unread_products
from strategies.chunk.loops.schedule import Schedule
from strategies.chunk.loops.score_reuse import row_losses
from strategies.chunk.running.runtime import (
    Buffer,
    ChunkLoop,
    call_giving,
    call_under,
    dense_strides,
    narrowed,
    take_chunk,
    write_chunk,
)
from strategies.chunk.running.windowed_rows import run_on_rows
from strategies.estimate.in_place_reuse import Overwrite
from strategies.tracing.channel_norms import whole_norms

_aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True, slots=True)
class ScopeCode:
    """The code of a scope.

    Fields:
        module: code that takes the values of `reads`, the modules of `calls` and the scope's tensor inputs,
            in this order, and returns the scope's tensor outputs.
        reads: names of parameters, buffers and constants of the scope.
        calls: FQNs of the inner scopes, relative to the scope.
        loops: loops in the order in which they run.
    """

    module: fx.GraphModule
    reads: tuple[str, ...]
    calls: tuple[str, ...]
    loops: tuple[ChunkLoop, ...]


def lower(schedule: Schedule) -> ScopeCode:
    """Return a schedule as code."""
    return _Lowering(schedule.graph).code(schedule)


class _Lowering:
    def __init__(self, graph: fx.Graph) -> None:
        self._source = graph
        self._graph = fx.Graph()
        self._held: dict[str, nn.Module] = {}
        self._known: dict[fx.Node, fx.Node] = {}
        self._callees: dict[str, fx.Node] = {}

    def code(self, schedule: Schedule) -> ScopeCode:
        """Return the schedule as code.

        Parameters, called modules and inputs are placeholders of its graph, and each loop is a module.
        """
        reads: dict[str, fx.Node] = {}
        for node in self._source.find_nodes(op="get_attr"):
            if node.target not in reads:
                reads[str(node.target)] = self._graph.placeholder(node.name)
            self._known[node] = reads[str(node.target)]
        for fqn in dict.fromkeys(str(node.target) for node in self._source.find_nodes(op="call_module")):
            name = fqn.replace(".", "_")
            self._callees[fqn] = self._graph.placeholder(name if name.isidentifier() else f"_{name}")
        for node in self._source.find_nodes(op="placeholder"):
            self._known[node] = self._graph.placeholder(node.name)
        loops: list[ChunkLoop] = []
        saves = saved_storages(self._source)
        unread = unread_loops(schedule, saves)
        donated = schedule.donations()
        taken = {operand.node for item in schedule.items if isinstance(item, Loop) for operand in item.inputs}
        plain = whole_norms({item for item in schedule.items if isinstance(item, fx.Node)})
        norms = {node: front for node, front in plain.items() if front.isdisjoint(taken)}
        passes = {each for front in norms.values() for each in front}
        for item in schedule.items:
            if item in passes:
                continue
            if item in norms:
                self._known[item] = _whole_norm(self._graph, item, list(item.meta["val"].shape), self._known)  # type: ignore[arg-type, index]
            elif isinstance(item, Loop):
                left_out = unread_products(item, schedule.storages, saves)
                loop = replace(item, unread=left_out)
                loops.append(self._loop(loop, f"loop_{len(loops)}", is_unread=item in unread))
            else:
                given = donated.get(item, frozenset())
                self._known[item] = self._copied(item, given, schedule.overwrite(item))
        self._graph.output(tuple(self._known[node] for node in schedule.outputs))
        for node, new in self._known.items():
            new.meta.setdefault("val", node.meta.get("val"))
        return ScopeCode(
            module=fx.GraphModule(self._held, self._graph, "forward"),
            reads=tuple(reads),
            calls=tuple(self._callees),
            loops=tuple(loops),
        )

    def _copied(self, node: fx.Node, donated: frozenset[int], overwrite: Overwrite | None) -> fx.Node:
        """Return the copy of a node, in place where it may overwrite; a call is given what dies in it."""
        if overwrite is not None:
            args, kwargs = fx.map_arg((node.args, node.kwargs), self._known.__getitem__)
            return self._graph.create_node("call_function", overwrite.target, args, kwargs, name=node.name)
        if node.op != "call_module":
            return self._graph.node_copy(node, self._known.__getitem__)
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._known.__getitem__)
        given = self._callees[str(node.target)], tuple(sorted(donated))
        if node.meta["autocast"] or node.meta["detached"]:
            under = node.meta["autocast"], not node.meta["detached"]
            return self._graph.call_function(call_under, (*given, *under, *args), kwargs)
        return self._graph.call_function(call_giving, (*given, *args), kwargs)

    def _loop(self, loop: Loop, name: str, *, is_unread: bool) -> ChunkLoop:
        """Enter a loop as one call and take its results apart."""
        module = chunk_loop(loop, is_unread=is_unread)
        self._held[name] = module
        call = self._graph.call_module(name, tuple(self._known[operand.node] for operand in loop.inputs))
        if len(loop.outputs) == 1:
            self._known[loop.outputs[0].node] = call
            return module
        for index, result in enumerate(loop.outputs):
            self._known[result.node] = self._graph.call_function(operator.getitem, (call, index))
        return module


def chunk_loop(loop: Loop, *, is_unread: bool) -> ChunkLoop:
    """Return the module of a loop; `is_unread` as `ChunkLoop` has it."""
    with_gradients = differentiable(loop.region.members[0].graph)
    made = [result.node for result in loop.outputs]
    taken = (*loop.inputs, *loop.keeps())
    positions: dict[fx.Node | None, int] = {
        operand.node: index for index, operand in enumerate(loop.inputs) if operand.axis is not None
    }
    return ChunkLoop(
        body=_BodyWriter(loop, is_writing=True).code(),
        results=_BodyWriter(loop, is_writing=False).code(),
        axes=[operand.axis for operand in taken],
        copies=[operand.is_copied for operand in taken],
        updates=[loop.updates(operand) for operand in taken],
        keeps=[made.index(operand.node) for operand in loop.keeps()],
        ahead=None if loop.ahead is None else made.index(loop.ahead),
        outputs=[
            _buffer(result, positions.get(result.into), has_gradient=result.node in with_gradients)
            for result in loop.outputs
        ],
        size=loop.size,
        length=loop.length,
        is_unread=is_unread,
    )


def _buffer(result: LoopOutput, into: int | None, *, has_gradient: bool) -> Buffer:
    """Return the buffer that a result of a loop is written to."""
    value = result.node.meta["val"]
    return Buffer(
        shape=tuple(value.shape),
        strides=tuple(dense_strides(value)),
        dtype=value.dtype,
        device=value.device,
        axis=result.axis,
        into=into,
        has_gradient=has_gradient and value.is_floating_point(),
    )


def _whole_norm(
    graph: fx.Graph, node: fx.Node, sizes: Sequence[Any], known: Mapping[Any, fx.Node]
) -> fx.Node:
    """Return the last pass of a norm as the one operator that does all of them.

    Args:
        graph: where the operator stands.
        node: last pass.
        sizes: sizes of the input, in this graph.
        known: what stands in this graph for the input, the weight and the bias.
    """
    (x, scales), batch, channels = node.args, sizes[0], sizes[1]
    _, weight, bias, count, n_groups, eps, _ = scales.args  # type: ignore[union-attr]
    operands = (known[x], *(each and known[each] for each in (weight, bias)))
    given = (*operands, batch, channels, count, n_groups, eps)
    call = graph.call_function(_aten.native_group_norm.default, given)
    return graph.create_node("call_function", operator.getitem, (call, 0), name=node.name)


class _BodyWriter:
    """Writes the body of a loop, which writes its results to buffers or returns them."""

    def __init__(self, loop: Loop, *, is_writing: bool) -> None:
        self._loop = loop
        self._is_writing = is_writing
        self._graph = graph = fx.Graph()
        self._start, self._length = graph.placeholder("start"), graph.placeholder("length")
        # a value may be taken twice, along two axes or as a whole
        names = zip(loop.inputs, _names(loop), strict=True)
        self._outside = {operand: graph.placeholder(name) for operand, name in names}
        self._outputs = {result.node: result for result in loop.outputs}
        written = self._outputs if is_writing else ()
        self._buffers = {node: graph.placeholder(f"{node.name}_all") for node in written}
        kept = () if is_writing else loop.keeps()
        self._kept = {taken.node: graph.placeholder(f"{taken.node.name}_kept") for taken in kept}
        self._chunks: dict[LoopInput, fx.Node] = {} if is_writing else dict(self._outside)
        self._made: dict[fx.Node, fx.Node] = {}
        self._sizes: dict[int, Any] = {1: self._length}
        self._norms = {
            node: front
            for node, front in whole_norms(set(loop.region.members)).items()
            if loop.region.axes[node][0].dim == 0 and front.isdisjoint(self._outputs)  # type: ignore[union-attr]
        }
        self._passes = {each for front in self._norms.values() for each in front}

    def code(self) -> fx.GraphModule:
        """Return the body."""
        for node in self._loop.region.members:
            self._add(node)
        results = tuple(self._result(node) for node in self._outputs) if not self._is_writing else None
        self._graph.output(results)
        return fx.GraphModule({}, self._graph, "body")

    def _add(self, node: fx.Node) -> None:
        """Enter one operator of the loop's body: on chunks, as an addition to a total, or not at all."""
        loop, graph = self._loop, self._graph
        if node in self._passes:
            return
        if node in self._norms:
            self._add_norm(node)
            return
        inputs = iter([self._input(node, slot) for slot in range(len(slots(node)))])
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: next(inputs))
        if node in self._buffers and self._outputs[node].adds_in_place:
            graph.call_function(ADDING[node.target], (self._buffers[node], *args))
            return
        axes = loop.region.axes[node]
        is_inside_loss = not self._is_writing and node in loop.losses.values()
        if is_inside_loss or (axes and axes[0] is not None and is_slice_along(node, axes[0])):
            self._made[node] = args[0]  # type: ignore[assignment]
        else:
            self._call(node, args, kwargs)  # type: ignore[arg-type]
        if node in self._kept:
            self._made[node] = graph.call_function(known, (self._kept[node], self._made[node]))
        self._give(node)

    def _add_norm(self, node: fx.Node) -> None:
        """Enter a group norm whose passes lie in different loops, on the chunk that is at hand."""
        x, scales = slots(node)
        known = {each: self._input(scales, slot) for slot, each in enumerate(slots(scales)) if slot}
        axis = self._loop.region.axes[node][0]
        assert axis is not None
        sizes = self._sized(x.meta["val"], axis)
        made = _whole_norm(self._graph, node, sizes, known | {x: self._input(node, 0)})
        made.meta["val"] = node.meta["val"]
        self._made[node] = made
        self._give(node)

    def _give(self, node: fx.Node) -> None:
        """Write an output of the loop to its buffer."""
        if node in self._buffers:
            self._write(self._buffers[node], self._outputs[node].axis, self._result(node))

    def _input(self, node: fx.Node, slot: int) -> fx.Node:
        """Return what a member takes in the body, without what it does not need of a halo."""
        source, need = slots(node)[slot], self._loop.region.needs[node][slot]
        operand = self._loop.local(node, slot)
        if operand is not None:
            return self._narrowed(self._taken(operand), operand.axis, need)
        made = None if node.target is operator.getitem else self._loop.region.axes[source][0]
        return self._narrowed(self._made[source], made, need)

    def _result(self, node: fx.Node) -> fx.Node:
        """Return what the body makes of an output of the loop, without a halo."""
        axes = self._loop.region.axes[node]
        return self._narrowed(self._made[node], axes[0] if axes else None, self._outputs[node].axis)

    def _narrowed(self, made: fx.Node, given: Axis | None, wanted: Axis | None) -> fx.Node:
        if given is None or wanted is None or given == wanted:
            return made
        return self._graph.call_function(narrowed, (made, given, wanted, self._start, self._length))

    def _call(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Enter a call on chunks; one with a window also gets the rows around them."""
        called, args = self._called(node), self._local(node, args)
        axes, window = self._loop.region.axes[node], window_of(node)
        if window is not None and axes and axes[0] is not None and axes[0].dim == ROWS:
            taken: Any = (self._loop.region.needs[node][0], axes[0])
            args = (called, window, taken, (self._start, self._length), *args)
            called = run_on_rows
        made = self._graph.create_node("call_function", called, args, kwargs, name=node.name)
        made.meta["val"] = node.meta["val"]
        self._made[node] = made

    def _write(self, buffer: fx.Node, axis: Axis | None, made: fx.Node) -> None:
        if axis is None:
            self._graph.call_function(_aten.add_.Tensor, (buffer, made))
        else:
            self._graph.call_function(write_chunk, (buffer, axis, self._start, made))

    def _taken(self, operand: LoopInput) -> fx.Node:
        """Return the chunk of an operand, or all of it where it is not cut."""
        if operand.axis is None:
            return self._outside[operand]
        if operand not in self._chunks:
            given = self._outside[operand], operand.axis, self._start, self._length
            self._chunks[operand] = self._graph.call_function(take_chunk, given, {"copy": operand.is_copied})
        return self._chunks[operand]

    def _called(self, node: fx.Node) -> Any:
        """Return the operator that the body calls for a member."""
        if not self._is_writing and node in self._loop.losses:
            return row_losses
        if node in self._loop.overwrites:
            return self._loop.overwrites[node].target
        if self._is_writing:
            return node.target
        if node in self._loop.unread:
            return unread_product
        return product if self._loop.adds_gradients(node) else node.target

    def _local(self, node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of a member with the sizes of a chunk."""
        axes, value = self._loop.region.axes[node], node.meta["val"]
        axis = axes[0] if axes else None
        if axis is None:
            return args
        if node.target in SHAPED:
            return (args[0], self._sized(value, axis), *args[2:])
        if node.target in FACTORIES:
            return (self._sized(value, axis), *args[1:])
        if node.target is _aten.native_group_norm.default:  # its fourth argument is the size of the batch
            return (*args[:3], self._sized(value[0], axis)[0], *args[4:])
        if groups_of(node) > 1 and axis.dim == 1:
            return (*args[:8], self._times(groups_of(node) // axis.size))
        return args

    def _sized(self, value: Tensor, axis: Axis) -> list[Any]:
        """Return the shape of a chunk of `value`."""
        return axis.chunk_shape(value.shape, self._times(axis.factor(value.shape)))

    def _times(self, factor: int) -> Any:
        """Return a multiple of the length of the chunk."""
        if factor not in self._sizes:
            self._sizes[factor] = self._graph.call_function(operator.mul, (self._length, factor))
        return self._sizes[factor]


def _names(loop: Loop) -> list[str]:
    """Return a name for each thing that a loop takes, each only once."""
    count: Counter[str] = Counter()
    found = []
    for operand in loop.inputs:
        name = operand.node.name
        found.append(f"{name}_take_{count[name]}" if count[name] else name)
        count[name] += 1
    return found
