"""The graph of a whole model: which call's output reaches which other's input, and how each may run.

The forward is recorded on a shadow, down to torch's own modules that hold tensors. Linears, embeddings and
norms may change the state of what they read and give; functions pass on what they get; all else takes wholes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import _has_any_global_hook  # no public way

from strategies.errors import StrategyError
from strategies.shard.candidates.cost import Hardware
from strategies.shard.model.flow import (
    Flow,
    attention_flops,
    flows,
    function_name,
    is_random,
    is_view,
    outputs_of,
    sources_of,
)
from strategies.shard.model.leaf_modules import has_hooks, is_seen_through, why_not_placed
from strategies.shard.model.module_options import Leaf, Option, options, summed_parameter, ways
from strategies.shard.model.recording import Followed, Forward
from strategies.shard.model.soundness import Conflict, described, first_conflict
from strategies.shard.model.state import WHOLE, Value
from strategies.tracing.shadow import Shadow


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

    def fsdp_bytes(self, parameter: Tensor) -> int:
        """Return the payload of FSDP's collectives of a whole parameter in a step.

        It is gathered forward and backward, and its gradient is reduced and scattered.
        """
        if self.parameter_shards == 1:
            return 0
        return (2 + parameter.requires_grad) * parameter.numel() * parameter.element_size()

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
        parameter: FQN, of a parameter that a function reads.
        is_random: whether it draws random numbers, as many as a rank has elements.
        place: what is called, and where; the same in all blocks that are built alike.
    """

    name: str
    sources: tuple[int, ...]
    options: tuple[Option, ...]
    leaf: Leaf | None = None
    parameter: str | None = None
    is_random: bool = False
    place: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """What a graph was made of.

    Fields:
        forward: can be recorded again.
        whole: what it does on whole tensors.
        indices: of nodes of the recording, in the graph.
        ranks: on the mesh axis.
    """

    forward: Forward
    whole: Followed
    indices: Mapping[fx.Node, int]
    ranks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelGraph:
    """A model, its parameters included.

    Fields:
        nodes: in order.
        outputs: indices of those that the model returns, whole.
        resident_bytes: what a rank keeps, however the nodes run: parameters that are in no option, because
            several calls read them or nothing is known of the one that does, with their gradients.
        unsplit: why linears that the model says how to split cannot be, by FQN.
        recorded: what it was made of.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    resident_bytes: int = 0
    unsplit: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    recorded: Recorded | None = None

    def conflict_of(self, choice: Sequence[Option]) -> Conflict | None:
        """Return where the model's code does something else on a rank's parts than on the whole, if anywhere.

        Args:
            choice: one option a node.
        """
        if self.recorded is None:
            return None
        return first_conflict(
            self.recorded.forward,
            self.recorded.whole,
            {node: choice[index].output for node, index in self.recorded.indices.items()},
            {node.leaf.fqn for node in self.nodes if node.leaf is not None},
            self.recorded.ranks,
        )

    def without(self, conflict: Conflict, choice: Sequence[Option]) -> ModelGraph | None:
        """Return the graph where the likeliest suspect, and those built alike, are in another state.

        Args:
            conflict: of the choice.
            choice: one option a node.

        `None` where nothing is suspected.
        """
        assert self.recorded is not None
        if not conflict.suspects:
            return None
        suspect = self.recorded.indices[conflict.suspects[0]]
        place, state = self.nodes[suspect].place, choice[suspect].output
        return replace(
            self,
            nodes=tuple(
                replace(node, options=tuple(option for option in node.options if option.output != state))
                if index == suspect or (place and node.place == place)
                else node
                for index, node in enumerate(self.nodes)
            ),
        )


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
    if _has_any_global_hook():
        raise StrategyError(where, "needs a process without hooks on all modules, which would see shards")
    forward, graph, whole = _recorded(model, sample, where)
    builder = _Builder(model, whole, axis, hardware)
    nodes = builder.nodes(graph)
    in_options = sum(sum(node.leaf.parameter_bytes.values()) for node in nodes if node.leaf is not None)
    all_bytes = sum(map(axis.resting_bytes, model.parameters()))
    (output,) = (node for node in graph.nodes if node.op == "output")
    return ModelGraph(
        nodes=nodes,
        outputs=tuple(builder.indices[each] for each in output.all_input_nodes),
        resident_bytes=all_bytes - in_options,
        unsplit=builder.unsplit(),
        recorded=Recorded(forward=forward, whole=whole, indices=builder.indices, ranks=axis.ranks),
    )


class _Builder:
    """Makes the nodes of a graph.

    Attributes:
        indices: of nodes of the recording; all reads of a parameter are one node.
    """

    def __init__(self, model: nn.Module, whole: Followed, axis: TensorAxis, hardware: Hardware) -> None:
        self.indices: dict[fx.Node, int] = {}
        self._modules = dict(model.named_modules())
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._axis = axis
        self._hardware = hardware
        self._steps = {step.node: step for step in whole.steps}
        self._bypassed = whole.bypassed
        self._calls = Counter(step.node.target for step in whole.steps if step.node.op == "call_module")
        self._read = {
            id(self._parameters[str(step.node.target)])
            for step in whole.steps
            if step.node.op == "get_attr" and step.node.target in self._parameters
        }
        self._holders = Counter(map(id, self._parameters.values()))

    def nodes(self, graph: fx.Graph) -> tuple[Node, ...]:
        """Return the nodes of all that is used."""
        nodes: list[Node] = []
        parameters: dict[str, int] = {}
        for node in graph.nodes:
            if node not in self._steps or node.op == "output":
                continue
            if node.op == "get_attr":
                self.indices[node] = parameters.setdefault(str(node.target), len(nodes))
                if self.indices[node] < len(nodes):
                    continue
            self.indices[node] = len(nodes)
            nodes.append(self._node(node))
        return tuple(nodes)

    def _node(self, node: fx.Node) -> Node:
        if node.op == "placeholder":
            return Node(name=node.name, sources=(), options=(Option(inputs=(), output=WHOLE),))
        if node.op == "get_attr":
            return self._attribute(node)
        sources = sources_of(node)
        indices = tuple(self.indices[source] for source in sources)
        leaf = self._leaf(node) if node.op == "call_module" else None
        if leaf is not None:
            place = described(self._steps[node])
            return Node(
                name=leaf.fqn,
                sources=indices,
                options=tuple(self._placed(leaf)),
                leaf=leaf,
                place=re.sub(r"\.\d+\b", ".*", place),
            )
        inputs = [_value(node, source) for source in sources]
        return Node(
            name=node.name,
            sources=indices,
            options=tuple(self._passed(node, inputs, flow) for flow in flows(node, inputs, self._axis.ranks)),
            is_random=is_random(node),
            place=described(self._steps[node]),
        )

    def _attribute(self, node: fx.Node) -> Node:
        """Return the node of a parameter or buffer that functions read, in any state that can be arranged."""
        fqn = str(node.target)
        whole = Option(inputs=(), output=WHOLE)
        parameter = self._parameters.get(fqn)
        if parameter is None or not self._is_read_at_home(fqn, parameter):
            return Node(name=node.name, sources=(), options=(whole,))
        _, _, name = fqn.rpartition(".")
        summed = summed_parameter(name, parameter, self._axis.ranks, self._hardware)
        return Node(name=node.name, sources=(), options=(whole, summed), parameter=fqn)

    def _is_read_at_home(self, fqn: str, parameter: Tensor) -> bool:
        """Return whether nobody reads a parameter but a module without submodules, in its own forward."""
        home, _, _ = fqn.rpartition(".")
        reads = (step for step in self._steps.values() if step.node.target == fqn)
        return (
            parameter.requires_grad
            and self._holders[id(parameter)] == 1
            and not any(True for _ in self._modules[home].children())
            and all(home in step.within for step in reads)
        )

    def _leaf(self, node: fx.Node) -> Leaf | None:
        fqn = str(node.target)
        module = self._modules[fqn]
        split = self._axis.split(fqn) if isinstance(module, nn.Linear) else None
        if why_not_placed(module) or self._why_not_called_so(node):
            return None
        (source,) = sources_of(node)
        value = _value(node, source)
        assert value is not None
        own = {
            name: parameter
            for name, parameter in module.named_parameters(recurse=False)
            if not self._is_shared(parameter)
        }
        return Leaf(
            fqn=fqn,
            module=module,
            input=value,
            output=outputs_of(node)[0],
            split=split,
            parameter_bytes={name: self._axis.resting_bytes(each) for name, each in own.items()},
            fsdp_bytes={name: self._axis.fsdp_bytes(each) for name, each in own.items()},
        )

    def unsplit(self) -> dict[str, str]:
        """Return what `ModelGraph` has of the linears that the forward uses."""
        calls = {
            step.node.target: step.node for step in self._steps.values() if step.node.op == "call_module"
        }
        used = {fqn for step in self._steps.values() for fqn in step.within} | calls.keys()
        found: dict[str, str] = {}
        for fqn, module in self._modules.items():
            if fqn not in used or not isinstance(module, nn.Linear) or self._axis.split(fqn) is None:
                continue
            problem = why_not_placed(module) or self._why_not_called_so(calls[fqn])
            if problem is None and any(map(self._stays_whole, module.parameters())):
                problem = "has a parameter that others read, or that has hooks"
            if problem is not None:
                found[fqn] = problem
        return found

    def _why_not_called_so(self, node: fx.Node) -> str | None:
        given = (*node.args, *node.kwargs.values())
        if self._calls[node.target] > 1:
            return f"is called {self._calls[node.target]} times"
        if len(given) != 1 or not isinstance(given[0], fx.Node):
            return "is called with more than one tensor"
        if node.target in self._bypassed:
            return "has its forward called directly, too"
        return None

    def _is_shared(self, parameter: Tensor) -> bool:
        return self._holders[id(parameter)] > 1 or id(parameter) in self._read

    def _placed(self, leaf: Leaf) -> Iterator[Option]:
        stays_whole = any(map(self._stays_whole, leaf.module.parameters()))
        for way in ways(leaf, self._axis.ranks, self._hardware):
            splits_parameters = any(held.placement.is_shard() for held in way.parameters.values())
            if not (stays_whole and splits_parameters):
                yield from options(leaf, way, self._axis.ranks, self._hardware)

    def _stays_whole(self, parameter: Tensor) -> bool:
        """Return whether a parameter may not be split: others have it, or hooks wait for its gradient."""
        hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks  # noqa: SLF001 (no public way)
        return self._is_shared(parameter) or any(hooks)

    def _passed(self, node: fx.Node, inputs: Sequence[Value | None], flow: Flow) -> Option:
        ranks = self._axis.ranks
        flops = attention_flops(node, inputs) // (1 if flow.output.dim is None else ranks)
        held = 0 if is_view(node) else sum(each.local_bytes(flow.output, ranks) for each in outputs_of(node))
        return Option(
            inputs=flow.inputs,
            output=flow.output,
            seconds=self._hardware.compute_s(flops),
            memory_bytes=held,
        )


def _recorded(model: nn.Module, sample: tuple[Any, ...], where: str) -> tuple[Forward, fx.Graph, Followed]:
    """Return the forward down to functions; down to modules, where these are not to be looked into."""
    try:
        shadow = Shadow.of(model)
        forward = _forward(model, shadow, sample, to_functions=True)
        try:
            graph, whole = forward.on_wholes()
        except StrategyError:
            forward = _forward(model, shadow, sample, to_functions=False)
            graph, whole = forward.on_wholes()
    except StrategyError as error:
        raise StrategyError(where, f"needs a forward that can be followed; {error.problem}") from error
    for step in whole.steps:
        if any(isinstance(size, torch.SymInt) for shape in step.shapes for size in shape):
            problem = f"needs sizes that do not depend on data; those of {described(step)} do"
            raise StrategyError(where, f"{problem}; use mesh.tp=1")
    return forward, graph, whole


def _forward(model: nn.Module, shadow: Shadow, sample: tuple[Any, ...], *, to_functions: bool) -> Forward:
    through = {
        name: module
        for name, module in model.named_modules()
        if name and is_seen_through(module, to_functions=to_functions)
    }
    return Forward(
        shadow=shadow,
        sample=sample,
        through=frozenset(through),
        hooked=frozenset(name for name, module in through.items() if has_hooks(module)),
    )


def _value(node: fx.Node, source: fx.Node) -> Value | None:
    """Return the tensor that `node` reads of `source`; of a tuple, the part that it picks."""
    given = source.meta["val"]
    if not isinstance(given, Tensor):
        given = node.meta["val"] if function_name(node) == "getitem" else None
    return Value.of(given) if isinstance(given, Tensor) else None
