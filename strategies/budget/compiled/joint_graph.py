"""The joint graph of forward and backward that AOTAutograd traces of a block, and what a plan needs of it.

Its operators are numbered as those of a step are (`plan`): a value has the same address in both.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch._functorch import partitioners
from torch._functorch._aot_autograd.utils import _is_primal as is_primal
from torch._functorch._aot_autograd.utils import _is_tangent as is_tangent
from torch._library.fake_class_registry import FakeScriptObject
from torch._library.opaque_object import is_opaque_value
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node

from strategies.base import StrategyError
from strategies.budget.compiled.joint_steps import JointSteps, maker_of
from strategies.budget.plan import Value
from strategies.estimate.tensors import dtype_name, tensors_in
from strategies.step.needed import needed
from strategies.step.operator_facts import facts_of, fake_mode, is_numbered
from strategies.step.sizes import TensorSize

_EAGER = "use ac.executor=eager compile=none"


class JointGraph:
    """A joint graph.

    *Forward* are the nodes that the results of forward follow from, and what these operators return besides;
    all others run in backward. The *home* of a node is the node that makes its storage: the operator itself,
    or the one that takes a result out of several; an input; or a constant.

    Args:
        module: the graph as AOTAutograd gives it to a partitioner.
        num_fwd_outputs: number of results of forward; gradients follow.
        fqn: plain FQN of the block, for errors.

    Raises:
        StrategyError: an operator writes in place, or a size is not known before the block runs.
    """

    def __init__(self, module: GraphModule, num_fwd_outputs: int, fqn: str) -> None:
        self.module = module
        self.num_fwd_outputs = num_fwd_outputs
        self._fqn = fqn
        self._nodes: Sequence[Node] = tuple(module.graph.nodes)
        self._place = {node: place for place, node in enumerate(self._nodes)}
        outputs, gradients, *_ = partitioners._extract_fwd_bwd_outputs(  # noqa: SLF001 (no public way)
            module, num_fwd_outputs=num_fwd_outputs
        )
        self._forward = self._returned_with(_ancestors(outputs))
        self._backward = _ancestors(gradients)
        self._homes: dict[Node, Node] = {}
        for node in self._nodes:
            self._refuse(node)
            self._homes[node] = self._home(node)

    @cached_property
    def operators(self) -> Sequence[Node]:
        """The operators of forward that have a number, in order."""
        return [node for node in self._nodes if node in self._forward and _has_number(node)]

    @cached_property
    def primals(self) -> Sequence[Node]:
        """The inputs of forward."""
        return [node for node in self._nodes if is_primal(node)]

    @cached_property
    def asked(self) -> frozenset[Node]:
        """The homes in forward of what backward reads."""
        return frozenset(home for node in self.plain_backward for home in self.asks(node))

    @property
    def unrepeatable(self) -> frozenset[Node]:
        """The homes in forward of what may not be made again: random numbers, and what ranks exchange."""
        homes = (node for node in self._forward if node.op == "call_function" and not self._is_tuple(node))
        return frozenset(node for node in homes if not _may_run_again(maker_of(node)))

    @cached_property
    def digest(self) -> str:
        """A digest of operators and of what follows from what; not of sizes."""
        digest = hashlib.sha256(str(self.num_fwd_outputs).encode())
        for node in self._nodes:
            names_group = isinstance(node.target, OpOverload) and facts_of(node.target).names_group
            args = node.args[:-1] if names_group else node.args  # ranks have groups of other names
            known = node.op, str(node.target), self._argument(args), self._argument(node.kwargs)
            digest.update(repr(known).encode())
        return digest.hexdigest()[:16]

    @property
    def sizes(self) -> tuple[TensorSize, ...]:
        """The sizes of the inputs of forward, parameters and device meshes among them."""
        numbered = [(f"input {number}", node) for number, node in enumerate(self.primals)]
        return tuple(size for name, node in numbered for size in _sizes(name, node))

    def home(self, node: Node) -> Node:
        """Return the node that makes the storage of `node`."""
        return self._homes[node]

    def node_of(self, value: Value) -> Node:
        """Return the node that makes the storage at an address of the plan.

        Raises:
            StrategyError: there is none.
        """
        made = self.operators[value.operator] if 0 <= value.operator < len(self.operators) else None
        if made is None or str(made.target) != value.name:
            raise StrategyError("ac", f"the plan of {self._fqn!r} names {value}, which its graph has not")
        results = made.meta["val"]
        if isinstance(results, Tensor):
            found = made
        else:
            places = [place for place, result in enumerate(results) if isinstance(result, Tensor)]
            of_results = {each.args[1]: each for each in made.users if each.target is operator.getitem}
            found = of_results.get(places[value.result], made)
        if self._homes[found] is not found:
            problem = f"{value} of {self._fqn!r} lies on memory of {self._homes[found]}"
            raise StrategyError("ac.executor", f"{problem}, and its operator does not say so; {_EAGER}")
        return found

    @cached_property
    def plain_backward(self) -> Sequence[Node]:
        """The nodes of backward in the order in which they run where forward saves all that they read."""
        order: dict[Node, None] = {}

        def enter(node: Node) -> None:
            """Enter a node with what it needs and is not there."""
            for each in node.all_input_nodes:
                if each.op != "placeholder" and each not in order and not self._is_saved(each):
                    enter(each)
            order[node] = None

        for node in self._own_backward:
            if node not in order:
                enter(node)
        return list(order)

    @cached_property
    def _own_backward(self) -> Sequence[Node]:
        """The nodes of backward that follow from its inputs; the others run where these need them.

        They come in an order that needs few bytes.
        """
        following: set[Node] = set()
        for node in self._nodes:
            if is_tangent(node) or not following.isdisjoint(node.all_input_nodes):
                following.add(node)
        rest = [node for node in self._nodes if node in self._backward and node.op == "call_function"]
        own = [node for node in rest if node in following] + [
            node
            for node in rest
            if node not in following and node not in self._forward and self._is_gradient(node)
        ]
        gradients = frozenset(filter(self._is_gradient, own))
        return JointSteps(own, self._homes, self.unrepeatable, gradients).ordered()

    def _is_gradient(self, node: Node) -> bool:
        return any(user.op == "output" for user in node.users)

    def _is_saved(self, node: Node) -> bool:
        is_made_in_forward = node in self._forward and self._homes[node] is node and node.op != "get_attr"
        return is_made_in_forward and not self._is_tuple(node)

    def asks(self, node: Node) -> Iterator[Node]:
        """Yield the homes in forward that a node of backward reads, in the order of its arguments."""
        for each in node.all_input_nodes:
            if each in self._forward and each.op == "call_function" and self._homes[each] is each:
                yield each

    def in_order(self, nodes: Iterable[Node]) -> list[Node]:
        """Return nodes in the order of the graph."""
        return sorted(nodes, key=self._place.__getitem__)

    def results_of(self, unit: Node) -> list[Node]:
        """Return what is taken out of an operator of several results, where backward needs it."""
        return [each for each in unit.users if each.target is operator.getitem and each in self._backward]

    def _is_tuple(self, node: Node) -> bool:
        return not isinstance(node.meta.get("val"), Tensor)

    def _returned_with(self, nodes: set[Node]) -> frozenset[Node]:
        for node in self._nodes:
            if node.target is operator.getitem and node.args[0] in nodes:
                nodes.add(node)
        return frozenset(nodes)

    def _home(self, node: Node) -> Node:
        if node.target is operator.getitem:
            (source,) = node.all_input_nodes
            return node if self._homes[source] is source else self._homes[source]
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            return node
        is_view = not facts_of(node.target).is_fresh
        return self._homes[node.all_input_nodes[0]] if is_view and node.all_input_nodes else node

    def _refuse(self, node: Node) -> None:
        """Refuse a node that writes in place, or a size that is not known."""
        if (
            node.op == "call_function"
            and isinstance(node.target, OpOverload)
            and facts_of(node.target).writes
        ):
            problem = f"{node.target} in {self._fqn!r} writes in place, and may not run again"
            raise StrategyError("ac.executor", f"{problem}; {_EAGER}")
        if isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool):
            problem = f"{self._fqn!r} has sizes that are not known before it runs, such as {node.name!r}"
            raise StrategyError("ac.executor", f"{problem}; {_EAGER}")

    def _argument(self, value: Any) -> Any:
        """Return an argument for the digest: nodes by their places, but for meshes; and no sizes."""
        if isinstance(value, Node):
            return self._place[value] if not is_opaque(value) else "opaque"
        if isinstance(value, list | tuple):
            return [self._argument(each) for each in value]
        if isinstance(value, dict):
            return {name: self._argument(each) for name, each in value.items()}
        return type(value).__name__ if type(value) in {int, float} else str(value)


def is_opaque(node: Node) -> bool:
    """Say whether a node stands for an object that is no tensor and no number, such as a device mesh."""
    value = node.meta.get("val")
    return isinstance(value, torch.ScriptObject | FakeScriptObject) or is_opaque_value(value)


def _ancestors(outputs: Iterable[Any]) -> set[Node]:
    nodes = (node for node in outputs if isinstance(node, Node))
    return needed(nodes, lambda node: node.all_input_nodes)


def _has_number(node: Node) -> bool:
    is_operator = node.op == "call_function" and isinstance(node.target, OpOverload | HigherOrderOperator)
    return is_operator and is_numbered(node.target, fake_mode())


def _sizes(name: str, node: Node) -> Iterator[TensorSize]:
    """Yield the sizes of an input; a device mesh has none."""
    if is_opaque(node):
        yield TensorSize(name, (), "device mesh")
        return
    for value in tensors_in(node.meta["val"]):
        yield TensorSize(
            name, tuple(map(int, value.shape)), f"{dtype_name(value.dtype)} on {value.device.type}"
        )


def _may_run_again(unit: Node) -> bool:
    """Say whether an operator may run again: where it draws random numbers, a graph cannot put them back."""
    if not isinstance(unit.target, OpOverload | HigherOrderOperator):
        return True
    facts = facts_of(unit.target)
    return not (facts.communicates or facts.is_untagged or facts.draws(unit.args, unit.kwargs))
