"""The graph of one scope, and what is asked about it.

A scope is a module whose forward is a graph of its own: the model, and its blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import TreeSpec

from strategies.base import StrategyError


@dataclass(frozen=True, kw_only=True, slots=True)
class ScopeGraph:
    """The forward of one scope, for inputs of one kind.

    Fields:
        fqn: FQN of the scope in the model, `""` for the model itself.
        graph: placeholders are the tensors among the inputs; `get_attr` reads a parameter or buffer below the
            scope, or one of `constants`; `call_module` calls an inner scope by its FQN below the scope, with
            autocast as `meta["autocast"]` says, and without gradients where `meta["detached"]` does;
            `meta["standing"]` has the storages of its results that are no new ones, `meta["returns"]` the
            kind of its result, and `meta["opaque"]` says that the module is no scope but opaque; the rest are
            ATen operators. Each node has its fake result in `meta["val"]`; `meta["written"]` says that one of
            them writes in place to memory that the result lies on.
            `meta["has_gradients"]` of the output says that forward ran with gradients on.
        outputs: leaves of the return value; a tensor is its `OutputIndex`.
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


class OpaquePart(StrategyError):  # noqa: N818 (it tells of a part, and mostly is no error)
    """A module does what no graph would repeat.

    Args:
        where: configuration path that the message names.
        fqn: FQN of the module, which may run as it is; `""` for the model, which may not.
        graphs: graphs of the scopes, where forward has come to its end.
    """

    def __init__(self, where: str, problem: str, fqn: str, graphs: Sequence[ScopeGraph] = ()) -> None:
        super().__init__(where, problem)
        self.fqn = fqn
        self.graphs = graphs

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the graphs behind: a message to another process needs none, and they have no pickle."""
        return type(self), (self.where, self.problem, self.fqn)


def is_within(fqn: str, others: Iterable[str]) -> bool:
    """Return whether a module is one of `others`, or lies below one of them; all by FQN."""
    return any(fqn == other or fqn.startswith(f"{other}.") for other in others)


def may_run_again(graph: fx.Graph) -> bool:
    """Return whether a second run of the forward finds what the first one found, and does nothing twice."""
    return not writes_to_given(graph) and not any(map(is_opaque, graph.nodes))


def writes_to_given(graph: fx.Graph) -> bool:
    """Return whether an operator writes to an input, a parameter or a buffer."""
    given = (node for node in graph.nodes if node.op in {"placeholder", "get_attr"})
    return any(node.meta["written"] for node in given)


def is_opaque(node: fx.Node) -> bool:
    """Return whether a node is the call of a module that runs as it is."""
    return "opaque" in node.meta
