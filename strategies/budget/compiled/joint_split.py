"""Splitting the joint graph of a block into forward and backward, as a plan says."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

from torch._functorch import partitioners
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._ordered_set import OrderedSet

from strategies.base import StrategyError
from strategies.budget.compiled.joint_graph import JointGraph, is_opaque
from strategies.budget.compiled.joint_order import Run, backward_runs
from strategies.budget.plan import BlockPlan
from strategies.step.call_sizes import OTHER_OPERATORS, difference

_TAKES_OPAQUE = "saved_opaque_nodes" in signature(partitioners._extract_fwd_bwd_modules).parameters  # noqa: SLF001 (as below)
"""Torch 2.11 finds objects that are no tensors among the saved values itself."""


def split(
    graph: JointGraph,
    kept: frozenset[Node],
    static_inputs: Sequence[int] | None = None,
    *,
    again: frozenset[Node] = frozenset(),
) -> tuple[GraphModule, GraphModule]:
    """Return the graphs of forward and backward.

    Forward returns what is kept behind its own results. Backward runs the rest of what it reads once more,
    each value just before its first reader, or, of `again`, before each.

    Args:
        static_inputs: numbers of inputs that stay where they are.
        again: nodes of forward that are made again for each reader.
    """
    runs = backward_runs(graph, kept, again)
    read = {each for run in runs for each in run.node.all_input_nodes}
    saved = [
        node
        for node in graph.module.graph.nodes
        if node in read and (node in kept or node in graph.primals) and not is_opaque(node)
    ]
    opaque = [node for node in graph.primals if is_opaque(node)]
    placeholders = graph.module.graph.find_nodes(op="placeholder")
    forward, backward = partitioners._extract_fwd_bwd_modules(  # noqa: SLF001 (what torch's own partitioners call)
        graph.module,
        *((saved, [], opaque) if _TAKES_OPAQUE else ([*saved, *opaque], [])),
        num_fwd_outputs=graph.num_fwd_outputs,
        static_lifetime_input_nodes=OrderedSet(placeholders[number] for number in static_inputs or ()),
    )
    _reorder(backward, runs)
    return forward, backward


def _reorder(module: GraphModule, runs: Sequence[Run]) -> None:
    """Put the nodes of a graph into an order, behind its inputs, some several times; the others go.

    Nobody reads those. A collective of forward is one of them: it counts as a node with an effect, and would
    run again.
    """
    nodes = {node.name: node for node in module.graph.nodes if node.op not in {"placeholder", "output"}}
    operands = {name: (node.args, node.kwargs) for name, node in nodes.items()}
    names = {run.node.name for run in runs}
    (end,) = module.graph.find_nodes(op="output")
    made: dict[int, Node] = {}
    fresh = dict(nodes)
    for number, run in enumerate(runs):
        if run.node.name not in nodes:
            continue
        node = fresh.pop(run.node.name, None)
        if node is None:
            node = module.graph.node_copy(nodes[run.node.name])
        end.prepend(node)
        latest = {nodes[each.name]: made[run_of] for each, run_of in run.reads.items()}
        node.args, node.kwargs = map_arg(operands[run.node.name], lambda each: latest.get(each, each))  # noqa: B023 (it is called at once)
        made[number] = node
    for dead in reversed([node for name, node in nodes.items() if name not in names]):
        module.graph.erase_node(dead)
    module.graph.lint()
    module.recompile()


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedPartition:
    """A partition function, as AOTAutograd calls it, that carries out the plan of one block.

    Partitions of blocks that are planned alike are equal.

    Fields:
        fqn: plain FQN of the block, for errors.
        plan: the plan, without its FQN. A block that is plain keeps all that its backward reads.
    """

    fqn: str = field(compare=False)
    plan: BlockPlan

    @classmethod
    def of(cls, plan: BlockPlan) -> PlannedPartition:
        """Return the partition that carries out the plan of a block."""
        return cls(fqn=plan.fqn, plan=replace(plan, fqn=""))

    def __call__(
        self,
        joint_module: GraphModule,
        joint_inputs: Any,  # noqa: ARG002 (partition functions get them)
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **options: Any,  # noqa: ARG002 (Inductor gives its name)
    ) -> tuple[GraphModule, GraphModule]:
        """Return the graphs of forward and backward.

        Smaller inputs may have other operators, as a batch of one often has: then nothing is kept,
        and Python warns.

        Raises:
            StrategyError: the graph is not the planned one, or larger.
        """
        graph = JointGraph(joint_module, num_fwd_outputs, self.fqn)
        inputs = [size for size in self.plan.sizes if size.name.startswith("input ")]
        unlike = difference(inputs, graph.sizes)
        is_smaller = unlike is None and [*graph.sizes] != inputs
        if graph.digest != self.plan.graph and not is_smaller:
            problem = f"the plan of {self.fqn!r} was made for a graph of digest {self.plan.graph}"
            raise StrategyError("ac", f"{problem}, and the compiler made {graph.digest}; make the plan again")
        if unlike is not None:
            problem = f"the plan of {self.fqn!r} was {unlike}"
            raise StrategyError("ac", f"{problem}; make it again for these sizes")
        again = self.plan.again if graph.digest == self.plan.graph else ()
        nodes_again = frozenset(map(graph.node_of, again))
        return split(graph, self._kept(graph), static_lifetime_input_indices, again=nodes_again)

    def _kept(self, graph: JointGraph) -> frozenset[Node]:
        """Return what forward saves; of other operators, which smaller inputs may have, nothing."""
        if self.plan.plain:
            return graph.asked
        if graph.digest == self.plan.graph:
            return frozenset(map(graph.node_of, self.plan.keep))
        warnings.warn(OTHER_OPERATORS, stacklevel=2)
        return graph.unrepeatable
