"""The graph of a whole model: which call's output reaches which other's input, and how each may run.

The forward is recorded on a shadow, down to those modules that hold tensors. Linears, embeddings and norms
may change the state of what they read and give; functions pass on what they get; all else takes wholes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from strategies.errors import StrategyError
from strategies.fx.program import device_of, record, shadowed
from strategies.fx.scopes import Scope
from strategies.fx.shadow import Shadow
from strategies.shard.cost import Hardware
from strategies.shard.flow import Flow, attention_flops, flows, function_name, is_random, is_view, outputs_of
from strategies.shard.state import WHOLE, Value
from strategies.shard.ways import Leaf, Option, options, ways

_PLACEABLE = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorAxis:
    """The mesh axis over whose ranks operators are sharded.

    Fields:
        ranks: on it, >= 1.
        splits: `{FQN pattern: "column" | "row"}` of the linears between which the model's code runs on a
            shard of features, as it does on any number of heads; a star stands for one name.
        data_ranks: ranks on the axis before this one, each of which has its own rows of the batch.
        parameter_shards: FSDP shards into which a rank's parameters and gradients are cut once more.
        parameter_itemsize: bytes an element of parameters at rest, where they are computed with in another
            dtype; `None` for the dtype in which the model is given.
    """

    ranks: int
    splits: Mapping[str, str]
    data_ranks: int = 1
    parameter_shards: int = 1
    parameter_itemsize: int | None = None

    def split(self, fqn: str) -> str | None:
        """Return what `splits` say of a module."""
        names = fqn.split(".")
        for pattern, style in self.splits.items():
            parts = pattern.split(".")
            if len(parts) == len(names) and all(map(fnmatchcase, names, parts)):
                return style
        return None

    def resting_bytes(self, parameter: Tensor) -> int:
        """Return what a rank keeps of a whole parameter, and of its gradient where it gets one."""
        itemsize = self.parameter_itemsize or parameter.element_size()
        whole = (1 + parameter.requires_grad) * parameter.numel() * itemsize
        return -(-whole // self.parameter_shards)


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A call, an input or a parameter of a model.

    Fields:
        name: unique, for readers.
        sources: indices of the nodes whose tensors it reads.
        options: how it may run, on whole tensors first.
        leaf: of a leaf module that can stand in other states than what surrounds it.
        is_random: whether it draws random numbers, as many as a rank has elements.
    """

    name: str
    sources: tuple[int, ...]
    options: tuple[Option, ...]
    leaf: Leaf | None = None
    is_random: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelGraph:
    """A model, its parameters included.

    Fields:
        nodes: in order.
        outputs: indices of those that the model returns, whole.
        resident_bytes: what a rank keeps, however the nodes run: parameters that are in no option, because
            several calls read them or nothing is known of the one that does, with their gradients.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    resident_bytes: int = 0


def model_graph(
    model: nn.Module, sample: tuple[Any, ...], axis: TensorAxis, hardware: Hardware, *, where: str
) -> ModelGraph:
    """Return the graph of `model` for inputs like `sample`.

    Args:
        model: plain; on the meta device or any other.
        sample: positional inputs; meta tensors are enough.
        axis: to shard over.
        hardware: what costs are reckoned on.
        where: configuration path of the strategy, for messages.

    Raises:
        StrategyError: the forward cannot be recorded, or depends on data.
    """
    graph = _recorded(model, sample, where)
    modules = dict(model.named_modules())
    built = _Builder(graph, modules, _tied(model, graph), axis, hardware).build()
    in_options = sum(sum(node.leaf.parameter_bytes.values()) for node in built.nodes if node.leaf is not None)
    all_bytes = sum(map(axis.resting_bytes, model.parameters()))
    return replace(built, resident_bytes=all_bytes - in_options)


class _Builder:
    def __init__(
        self,
        graph: fx.Graph,
        modules: Mapping[str, nn.Module],
        tied: frozenset[int],
        axis: TensorAxis,
        hardware: Hardware,
    ) -> None:
        self._graph = graph
        self._modules = modules
        self._tied = tied
        self._axis = axis
        self._hardware = hardware
        self._calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
        self._indices: dict[fx.Node, int] = {}

    def build(self) -> ModelGraph:
        nodes: list[Node] = []
        for node in self._graph.nodes:
            if node.op == "output":
                return ModelGraph(
                    nodes=tuple(nodes),
                    outputs=tuple(self._indices[each] for each in node.all_input_nodes),
                )
            self._indices[node] = len(nodes)
            nodes.append(self._node(node))
        raise AssertionError("a graph ends in its output")

    def _node(self, node: fx.Node) -> Node:
        if node.op in ("placeholder", "get_attr"):
            return Node(name=node.name, sources=(), options=(Option(inputs=(), output=WHOLE),))
        sources = tuple(node.all_input_nodes)
        indices = tuple(self._indices[source] for source in sources)
        module = self._modules[str(node.target)] if node.op == "call_module" else None
        leaf = self._leaf(node, module)
        if leaf is not None:
            return Node(name=leaf.fqn, sources=indices, options=tuple(self._placed(leaf)), leaf=leaf)
        inputs = [_read(node, source) for source in sources]
        return Node(
            name=node.name,
            sources=indices,
            options=tuple(self._passed(node, inputs, flow) for flow in flows(node, inputs, self._axis.ranks)),
            is_random=is_random(node),
        )

    def _leaf(self, node: fx.Node, module: nn.Module | None) -> Leaf | None:
        given = outputs_of(node)
        is_plain_call = len(node.args) == 1 and isinstance(node.args[0], fx.Node) and not node.kwargs
        if not isinstance(module, _PLACEABLE) or self._calls[node.target] > 1 or not is_plain_call:
            return None
        return Leaf(
            fqn=str(node.target),
            module=module,
            input=_read(node, node.all_input_nodes[0]),
            output=given[0],
            split=self._axis.split(str(node.target)) if isinstance(module, nn.Linear) else None,
            parameter_bytes={
                name: self._axis.resting_bytes(parameter)
                for name, parameter in module.named_parameters(recurse=False)
                if id(parameter) not in self._tied
            },
        )

    def _placed(self, leaf: Leaf) -> Iterator[Option]:
        is_tied = any(id(parameter) in self._tied for parameter in leaf.module.parameters())
        for way in ways(leaf, self._axis.ranks, self._hardware):
            splits_parameters = any(held.placement.is_shard() for held in way.parameters.values())
            if not (is_tied and splits_parameters):
                yield from options(leaf, way, self._axis.ranks, self._hardware)

    def _passed(self, node: fx.Node, inputs: Sequence[Value], flow: Flow) -> Option:
        ranks = self._axis.ranks
        flops = attention_flops(node, inputs) // (1 if flow.output.dim is None else ranks)
        held = 0 if is_view(node) else sum(each.local_bytes(flow.output, ranks) for each in outputs_of(node))
        return Option(
            inputs=flow.inputs,
            output=flow.output,
            seconds=self._hardware.compute_s(flops),
            memory_bytes=held,
        )


def _recorded(model: nn.Module, sample: tuple[Any, ...], where: str) -> fx.Graph:
    device = device_of(tree_leaves(sample))
    through = frozenset(name for name, module in model.named_modules() if name and _is_seen_through(module))
    scope = Scope(fqn="", through=through, paths={}, depth=0)
    try:
        shadow = Shadow.of(model).on(device)
        recording = record(shadow, scope, *shadowed(shadow, (sample, {}), device))
    except StrategyError as error:
        raise StrategyError(where, f"needs a forward that can be followed; {error.problem}") from error
    for node in recording.graph.nodes:
        sizes = [size for each in tree_leaves(node.meta.get("val")) for size in getattr(each, "shape", ())]
        if any(isinstance(size, torch.SymInt) for size in sizes):
            raise StrategyError(where, f"needs sizes that do not depend on data; those of {node.name!r} do")
    return recording.graph


def _is_seen_through(module: nn.Module) -> bool:
    """Return whether a module stands for the modules and functions that it calls: it holds no tensors."""
    has_children = any(True for _ in module.children())
    return has_children or not any(True for _ in (*module.parameters(), *module.buffers()))


def _tied(model: nn.Module, graph: fx.Graph) -> frozenset[int]:
    """Return the `id` of each parameter that more than one module, or a function, reads."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    holders = Counter(map(id, parameters.values()))
    read = {id(parameters[node.target]) for node in graph.nodes if node.target in parameters}
    return frozenset({key for key, count in holders.items() if count > 1} | read)


def _read(node: fx.Node, source: fx.Node) -> Value:
    """Return the tensor that `node` reads of `source`; of a tuple, the part that it picks."""
    given = source.meta["val"]
    if isinstance(given, Tensor):
        return Value.of(given)
    picked = node.meta["val"] if function_name(node) == "getitem" else given[0]
    return Value.of(picked)
