"""Building of a model's graph from its recorded forward.

The forward is recorded on a shadow of the model, down to torch's own modules that hold tensors. Linears,
embeddings and norms may change the state of what they read and give. Functions pass on the states that their
rules allow. All other calls take whole tensors.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from strategies.base import StrategyError
from strategies.estimate.machine import Machine
from strategies.shard.model.call_states import (
    CallStates,
    attention_flops,
    function_name,
    is_random,
    is_view,
    outputs_of,
    sources_of,
    states_of_call,
)
from strategies.shard.model.forward_recording import Followed, Forward
from strategies.shard.model.graph import ModelGraph, Node, PythonState, TensorAxis, kind_of_inputs
from strategies.shard.model.leaf_modules import is_seen_through, why_not_placed
from strategies.shard.model.module_options import (
    LeafModule,
    NodeOption,
    module_candidates,
    options,
    summed_parameter,
)
from strategies.shard.model.placement_state import WHOLE, TensorValue
from strategies.shard.model.soundness import described, first_conflict
from strategies.tracing.guard import refuse_global_hooks
from strategies.tracing.module_state import has_hooks
from strategies.tracing.shadow import Shadow


def model_graph(model: nn.Module, sample: tuple[Any, ...], axis: TensorAxis, machine: Machine) -> ModelGraph:
    """Return the graph of `model` for inputs like `sample`.

    Args:
        model: plain model, on the meta device or any other.
        sample: positional inputs; meta tensors are enough.
        axis: mesh axis to shard over.
        machine: speed of a rank, by which costs are reckoned.

    Raises:
        StrategyError: the forward cannot be recorded, or depends on data.
    """
    refuse_global_hooks("shard")
    forward, graph, whole = _recorded(model, sample)
    builder = _Builder(model, whole, axis, machine)
    nodes = builder.nodes(graph)
    in_options = sum(sum(node.leaf.parameter_bytes.values()) for node in nodes if node.leaf is not None)
    all_bytes = sum(map(axis.resting_bytes, model.parameters()))
    leaves = frozenset(node.leaf.fqn for node in nodes if node.leaf is not None)
    (output,) = (node for node in graph.nodes if node.op == "output")
    return ModelGraph(
        nodes=nodes,
        outputs=tuple(builder.indices[each] for each in output.all_input_nodes),
        resident_bytes=all_bytes - in_options,
        unsplit=builder.unsplit(),
        kept_whole=builder.kept_whole(leaves),
        shapes={name: tuple(parameter.shape) for name, parameter in model.named_parameters()},
        indices=builder.indices,
        check=partial(first_conflict, forward, whole, leaves, axis.ranks),
        python=PythonState(inputs=kind_of_inputs(sample, {}), reads=whole.attributes),
    )


class _Builder:
    """Makes the nodes of a graph.

    Attributes:
        indices: index of each node of the recording; all reads of a parameter are one node.
    """

    def __init__(self, model: nn.Module, whole: Followed, axis: TensorAxis, machine: Machine) -> None:
        self.indices: dict[fx.Node, int] = {}
        self._modules = dict(model.named_modules())
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._axis = axis
        self._machine = machine
        self._steps = {step.node: step for step in whole.steps}
        self._bypassed = whole.bypassed
        self._calls: dict[str, list[fx.Node]] = {}
        for step in whole.steps:
            if step.node.op == "call_module":
                self._calls.setdefault(str(step.node.target), []).append(step.node)
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
        """Return a node of the graph with its options: an input, a parameter, a leaf module or a function."""
        if node.op == "placeholder":
            return Node(name=node.name, sources=(), options=(NodeOption(inputs=(), output=WHOLE),))
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
            options=tuple(
                self._passed(node, inputs, flow) for flow in states_of_call(node, inputs, self._axis.ranks)
            ),
            is_random=is_random(node),
            place=described(self._steps[node]),
        )

    def _attribute(self, node: fx.Node) -> Node:
        """Return the node of a parameter or buffer that functions read, in any state that can be arranged."""
        fqn = str(node.target)
        whole = NodeOption(inputs=(), output=WHOLE)
        parameter = self._parameters.get(fqn)
        if parameter is None or not self._is_read_at_home(fqn, parameter):
            return Node(name=node.name, sources=(), options=(whole,))
        summed = summed_parameter(fqn.rpartition(".")[2], parameter, self._axis.ranks, self._machine)
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

    def _leaf(self, node: fx.Node) -> LeafModule | None:
        """Return the leaf module that a call is of, `None` where it runs on whole tensors."""
        fqn = str(node.target)
        module = self._modules[fqn]
        split = self._axis.split(fqn) if isinstance(module, nn.Linear) else None
        if why_not_placed(module) or self._why_not_called_so(self._calls[fqn]):
            return None
        (source,) = sources_of(node)
        value = _value(node, source)
        assert value is not None
        own = {
            name: parameter
            for name, parameter in module.named_parameters(recurse=False)
            if not self._is_shared(parameter)
        }
        return LeafModule(
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
        used = {fqn for step in self._steps.values() for fqn in step.within} | self._calls.keys()
        linears = {fqn: module for fqn, module in self._modules.items() if isinstance(module, nn.Linear)}
        problems = {
            fqn: self._why_unsplit(fqn, module)
            for fqn, module in linears.items()
            if fqn in used and self._axis.split(fqn) is not None
        }
        return {fqn: problem for fqn, problem in problems.items() if problem is not None}

    def kept_whole(self, leaves: Iterable[str]) -> dict[str, str]:
        """Return what `ModelGraph` has of those leaf modules."""
        reasons = {fqn: self._why_whole(fqn, self._modules[fqn]) for fqn in leaves}
        return {fqn: reason for fqn, reason in reasons.items() if reason is not None}

    def _why_whole(self, fqn: str, module: nn.Module) -> str | None:
        """Return why the parameters of a module stay whole, `None` where they need not."""
        for name, parameter in module.named_parameters(recurse=False):
            own = f"{fqn}.{name}"
            others = (each for each, held in self._parameters.items() if held is parameter and each != own)
            other = next(others, None)
            if other is not None:
                return f"shares its {name} with {other.rpartition('.')[0]!r}"
            if self._stays_whole(parameter):
                return f"has a {name} that functions read, or that has hooks"
        return None

    def _why_unsplit(self, fqn: str, module: nn.Module) -> str | None:
        problem = why_not_placed(module) or self._why_not_called_so(self._calls[fqn])
        if problem is None and any(map(self._stays_whole, module.parameters())):
            return "has a parameter that others read, or that has hooks"
        return problem

    def _why_not_called_so(self, calls: Sequence[fx.Node]) -> str | None:
        """Return why a module's calls cannot be placed, `None` where they can."""
        if len(calls) > 1:
            return f"is called {len(calls)} times"
        (node,) = calls
        given = (*node.args, *node.kwargs.values())
        if len(given) != 1 or not isinstance(given[0], fx.Node):
            return "is called with more than one tensor"
        if node.target in self._bypassed:
            return "has its forward called directly, too"
        return None

    def _is_shared(self, parameter: Tensor) -> bool:
        return self._holders[id(parameter)] > 1 or id(parameter) in self._read

    def _placed(self, leaf: LeafModule) -> Iterator[NodeOption]:
        stays_whole = any(map(self._stays_whole, leaf.module.parameters()))
        for candidate in module_candidates(leaf, self._axis.ranks, self._machine):
            splits_parameters = any(held.placement.is_shard() for held in candidate.parameters.values())
            if not (stays_whole and splits_parameters):
                yield from options(leaf, candidate, self._axis.ranks, self._machine)

    def _stays_whole(self, parameter: Tensor) -> bool:
        """Return whether a parameter may not be split: others have it, or hooks wait for its gradient."""
        hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks  # noqa: SLF001 (no public way)
        return self._is_shared(parameter) or any(hooks)

    def _passed(self, node: fx.Node, inputs: Sequence[TensorValue | None], flow: CallStates) -> NodeOption:
        ranks = self._axis.ranks
        flops = attention_flops(node, inputs) // (1 if flow.output.dim is None else ranks)
        held = 0 if is_view(node) else sum(each.local_bytes(flow.output, ranks) for each in outputs_of(node))
        return NodeOption(
            inputs=flow.inputs, output=flow.output, seconds=self._machine.compute_s(flops), memory_bytes=held
        )


def _recorded(model: nn.Module, sample: tuple[Any, ...]) -> tuple[Forward, fx.Graph, Followed]:
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
        problem = f"needs a forward that can be followed; {error.problem}"
        raise StrategyError("shard", f"{problem}; use shard=none and mesh.tp=1") from error
    for step in whole.steps:
        if any(isinstance(size, torch.SymInt) for shape in step.shapes for size in shape):
            problem = f"needs sizes that do not depend on data; those of {described(step)} do"
            raise StrategyError("shard", f"{problem}; use shard=none and mesh.tp=1")
    return forward, graph, whole


def _forward(model: nn.Module, shadow: Shadow, sample: tuple[Any, ...], *, to_functions: bool) -> Forward:
    """Return how a forward is followed: which modules are looked into, and which of them have hooks."""
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


def _value(node: fx.Node, source: fx.Node) -> TensorValue | None:
    """Return the tensor that `node` reads of `source`; of a tuple, the part that it picks."""
    given = source.meta["val"]
    if not isinstance(given, Tensor):
        given = node.meta["val"] if function_name(node) == "getitem" else None
    return TensorValue.of(given) if isinstance(given, Tensor) else None
