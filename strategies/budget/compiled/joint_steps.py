"""The nodes of backward of a joint graph as steps, and the order of them that needs few bytes."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from torch._functorch._aot_autograd.utils import _is_primal as is_primal
from torch.fx import Node
from torch.fx.node import map_arg

from strategies.budget.compiled.thrifty_order import Step, thrifty_order
from strategies.estimate.flops import flops_of, is_uncounted
from strategies.estimate.tensors import tensors_in
from strategies.step.needed import needed
from strategies.step.operator_facts import facts_of


class JointSteps:
    """The nodes of backward, each with what it reads of forward and what is made again for it.

    What forward makes with FLOPs, or may not make again, counts as there until its last reader; all else as
    made again for each reader. That is what plans come to, whatever they keep.

    Args:
        nodes: the nodes, in an order in which they can run.
        homes: the node that makes the storage of each node.
        stays: homes that are never made again.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        homes: Mapping[Node, Node],
        stays: frozenset[Node],
        gradients: frozenset[Node],
    ) -> None:
        self._nodes = nodes
        self._number = {node: number for number, node in enumerate(nodes)}
        self._homes = homes
        self._stays = frozenset(map(maker_of, stays))
        self._gradients = gradients
        self._place = {node: place for place, node in enumerate(homes)}
        self._known: dict[Node, bool] = {}
        self._storages: dict[Node, int] = {}
        self._held: dict[int, int] = {}

    def ordered(self) -> list[Node]:
        """Return the nodes in an order that needs few bytes; ranks exchange in the order of the graph."""
        steps: list[Step] = []
        latest: int | None = None
        for number, node in enumerate(self._nodes):
            communicates = node.op == "call_function" and facts_of(node.target).communicates
            before = {latest} if communicates and latest is not None else set()
            steps.append(self._step(node, before))
            latest = number if communicates else latest
        outliving = frozenset(self._storage(self._made(node)) for node in self._gradients)
        return [self._nodes[number] for number in thrifty_order(steps, self._held, outliving)]

    def _step(self, node: Node, before: Iterable[int]) -> Step:
        direct = {self._made(each) for each in node.all_input_nodes}
        again = self._again(node)
        reads = direct.union(*({self._made(read) for read in each.all_input_nodes} for each in again))
        uses = {each for each in reads if each not in again and not is_primal(each)}
        self._held |= {self._storage(each): nbytes_of(each) for each in uses if each not in self._number}
        makes = self._homes[node] is node and node.target is not operator.getitem
        asked = direct & again.keys()
        return Step(
            after=frozenset(
                self._number[each] for each in node.all_input_nodes if each in self._number
            ).union(before),
            uses=frozenset(map(self._storage, uses)),
            makes={self._storage(node): nbytes_of(node)} if makes else {},
            making_bytes=self._making_bytes(again, asked),
            beside_bytes=sum(map(nbytes_of, asked)),
        )

    def _made(self, node: Node) -> Node:
        """Return the operator, or the input, that makes the storage of a node."""
        return maker_of(self._homes[node])

    def _again(self, node: Node) -> dict[Node, None]:
        """Return the operators that run again for a node, in order."""

        def missing(reader: Node) -> list[Node]:
            makers = map(self._made, reader.all_input_nodes)
            return [maker for maker in makers if not self._is_there(maker)]

        return dict.fromkeys(sorted(needed(missing(node), missing), key=self._place.__getitem__))

    def _making_bytes(self, again: Iterable[Node], asked: AbstractSet[Node]) -> int:
        """Return the most bytes while operators run again, of which `asked` stay."""
        reads = {each: {self._made(read) for read in each.all_input_nodes} for each in again}
        readers = Counter(read for each in reads for read in reads[each])
        live = most = 0
        for each, read_by_it in reads.items():
            live += nbytes_of(each)
            most = max(most, live)
            readers.subtract(read_by_it)
            dropped = (read for read in {each, *read_by_it} & reads.keys() if not readers[read])
            live -= sum(nbytes_of(read) for read in dropped if read not in asked)
        return most

    def _is_there(self, maker: Node) -> bool:
        """Say whether what an operator makes is there for all readers: of backward, kept, or with FLOPs."""
        if maker not in self._known:
            self._known[maker] = (
                maker in self._number
                or maker in self._stays
                or maker.op != "call_function"
                or self._has_flops(maker)
            )
        return self._known[maker]

    def _has_flops(self, node: Node) -> bool:
        args: Any = map_arg(node.args, lambda read: read.meta["val"])
        kwargs: Any = map_arg(node.kwargs, lambda read: read.meta["val"])
        return flops_of(node.target, args, kwargs, node.meta["val"]) > 0 or is_uncounted(node.target, args)

    def _storage(self, node: Node) -> int:
        return self._storages.setdefault(node, len(self._storages))


def maker_of(home: Node) -> Node:
    """Return the operator that makes a storage, which may be one of its results."""
    if home.target is operator.getitem:
        (source,) = home.all_input_nodes
        return source
    return home


def nbytes_of(node: Node) -> int:
    """Return the bytes of what a node makes."""
    return sum(value.nbytes for value in tensors_in(node.meta.get("val")))
