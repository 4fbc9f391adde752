"""The graph of a whole model: which call's output reaches which other's input, and how each may run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, TypeAlias

from torch import Tensor, fx
from torch.utils._pytree import tree_flatten

from strategies.shard.candidates.layout import Shape
from strategies.shard.model.module_options import LeafModule, NodeOption
from strategies.shard.model.placement_state import State
from strategies.shard.model.soundness import Conflict
from strategies.tracing.module_state import CONSTANTS

Choice: TypeAlias = tuple[NodeOption, ...]
"""One option a node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorAxis:
    """The mesh axis over whose ranks operators are sharded.

    Fields:
        ranks: number of ranks, >= 1.
        splits: `{FQN pattern: "column" | "row"}` of the linears between which the model's code runs on a
            shard of features, as it does on any number of heads; a star stands for one name.
        data_ranks: number of ranks on the axis before this one; each has its own rows of the batch.
        parameter_shards: number of FSDP shards into which a rank's parameters and gradients are cut.
        parameter_itemsize: bytes an element of parameters at rest, if computation casts them; `None` for the
            dtype in which the model is given.
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
        name: unique name, for messages.
        sources: indices of the nodes whose tensors it reads.
        options: options by which it may run; the first is on whole tensors.
        leaf: the leaf module, if it can stand in other states than what surrounds it.
        parameter: FQN of a parameter that a function reads.
        is_random: whether it draws random numbers, as many as a rank has elements.
        place: name and line of the call; the same in all blocks that are built alike.
    """

    name: str
    sources: tuple[int, ...]
    options: tuple[NodeOption, ...]
    leaf: LeafModule | None = None
    parameter: str | None = None
    is_random: bool = False
    place: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonState:
    """The answers of Python that the recorded forward asked for; a plan holds as long as they do.

    Fields:
        inputs: kind of its inputs, as of `kind_of_inputs`.
        reads: FQN and attribute of what it and its calls read of modules.
    """

    inputs: str
    reads: tuple[tuple[str, str], ...]


def kind_of_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return structure, shapes and constants of inputs, which want gradients, and which are one tensor.

    A text, which a file can hold.
    """
    leaves, structure = tree_flatten((args, kwargs))
    places = {id(leaf): at for at, leaf in enumerate(leaves)}
    kinds = tuple(
        (tuple(leaf.shape), leaf.requires_grad, places[id(leaf)])
        if isinstance(leaf, Tensor)
        else (type(leaf), leaf if isinstance(leaf, CONSTANTS) else None)
        for leaf in leaves
    )
    return f"{structure} {kinds}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelGraph:
    """A model, its parameters included.

    Fields:
        nodes: calls, inputs and parameters, in order.
        outputs: indices of the nodes that the model returns, whole.
        resident_bytes: bytes that a rank keeps, however the nodes run: parameters that are in no option,
            because several calls read them or nothing is known of the one that does, with their gradients.
        unsplit: reasons why linears of the model's tensor parallel plan cannot be split, by FQN.
        kept_whole: reasons why a weight is not split, by FQN of the leaf module.
        shapes: shapes of the model's parameters, by FQN.
        indices: index of each node of the recording.
        check: finds where a rank's forward differs from the whole one; `None` where nothing was recorded.
        python: what the forward asked of Python; `None` where nothing was recorded.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    resident_bytes: int = 0
    unsplit: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    kept_whole: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    shapes: Mapping[str, Shape] = field(default_factory=lambda: MappingProxyType({}))
    indices: Mapping[fx.Node, int] = field(default_factory=lambda: MappingProxyType({}))
    check: Callable[[Mapping[fx.Node, State]], Conflict | None] | None = None
    python: PythonState | None = None

    def keeping(self, is_allowed: Callable[[int, NodeOption], bool]) -> ModelGraph:
        """Return the graph with the options that `is_allowed`, of a node's index and an option, accepts."""
        nodes = (
            replace(node, options=tuple(each for each in node.options if is_allowed(index, each)))
            for index, node in enumerate(self.nodes)
        )
        return replace(self, nodes=tuple(nodes))

    def conflict_of(self, choice: Choice) -> Conflict | None:
        """Return the first difference between the model's code on a rank's parts and on the whole, if any."""
        if self.check is None:
            return None
        return self.check({node: choice[index].output for node, index in self.indices.items()})

    def without(self, conflict: Conflict, choice: Choice) -> ModelGraph | None:
        """Return the graph where the likeliest suspect, and nodes built alike, are in another state.

        `None` if nothing is suspected.
        """
        if not conflict.suspects:
            return None
        suspect = self.indices[conflict.suspects[0]]
        place, state = self.nodes[suspect].place, choice[suspect].output
        alike = {index for index, node in enumerate(self.nodes) if place and node.place == place} | {suspect}
        return self.keeping(lambda index, option: index not in alike or option.output != state)
