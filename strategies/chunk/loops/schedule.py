"""Schedules: what runs in which order, single operators and loops, and the bytes and seconds that follow."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from strategies.chunk.flow.chunk_rules import slots
from strategies.chunk.loops.loop import Loop
from strategies.estimate.in_place_reuse import Overwrite
from strategies.estimate.liveness import IDLE, Key, Profile, Storages, StorageStep, simulate
from strategies.estimate.machine import Machine
from strategies.estimate.operator_cost import bytes_of, cost_of


@dataclass(kw_only=True, slots=True)
class Schedule:
    """The order in which single operators and loops of one graph run.

    Fields:
        storages: storages of the graph's values.
        calls: bytes that a call of an inner scope holds beyond its outputs.
        is_overwriting: true where single operators may overwrite an input.

    A loop's outputs are on storages of their own, or on the storage of an input. `_keys` has the storages
    of every such value, and `_moved` the operators that take or make one. `_copied` are operators that run
    in front of a loop and inside it; they overwrite nothing.
    """

    items: list[fx.Node | Loop]
    storages: Storages
    outputs: tuple[fx.Node, ...]
    calls: Mapping[fx.Node, int] = field(default_factory=dict)
    is_overwriting: bool = True
    _keys: dict[fx.Node, frozenset[Key]] = field(default_factory=dict, init=False)
    _moved: set[fx.Node] = field(default_factory=set, init=False)
    _copied: set[fx.Node] = field(default_factory=set, init=False)

    @classmethod
    def of_graph(cls, graph: fx.Graph) -> Schedule:
        """Return the schedule that runs each operator of `graph` once, on whole tensors."""
        nodes = [node for node in graph.nodes if node.op not in {"placeholder", "get_attr", "output"}]
        (result,) = next(node for node in graph.nodes if node.op == "output").args
        return cls(items=nodes, storages=Storages.of_graph(graph), outputs=tuple(result))

    @property
    def graph(self) -> fx.Graph:
        """The graph whose nodes are scheduled."""
        return next(iter(self.storages.keys)).graph

    def steps(self) -> list[StorageStep]:
        """Return what each item does to storages."""
        self._keys, self._moved = {}, set()
        self._copied = {node for item in self.items if isinstance(item, Loop) for node in item.region.copies}
        alone, moved, calls = self.storages.steps, self._moved, self.calls
        over = self.storages.overwrites if self.is_overwriting else {}
        return [
            self._loop_step(item)
            if isinstance(item, Loop)
            else self._node_step(item)
            if item in moved or item in calls or item in over
            else alone[item]
            for item in self.items
        ]

    def kept(self) -> set[Key]:
        """Return the storages of the outputs, after `steps`."""
        return {key for node in self.outputs for key in self.keys_of(node)}

    def keys_of(self, node: fx.Node) -> frozenset[Key]:
        """Return the storages of a node's value, after `steps`."""
        found = self._keys.get(node)
        return frozenset(self.storages.keys[node]) if found is None else found

    def is_moved(self, node: fx.Node) -> bool:
        """Return whether a value of `node` is on another storage than in the plain graph; after `steps`."""
        return node in self._moved

    def overwrite(self, node: fx.Node) -> Overwrite | None:
        """Return how a single operator overwrites an input, `None` where it does not; after `steps`."""
        may_overwrite = self.is_overwriting and node not in self._copied
        return self.storages.overwrites.get(node) if may_overwrite else None

    def _node_step(self, node: fx.Node) -> StorageStep:
        step = self.storages.steps[node]
        private_bytes = step.private_bytes + self.calls.get(node, 0)
        overwrite = self.overwrite(node)
        if overwrite is not None:
            self._keys[node] = self.keys_of(slots(node)[0])
            self._moved |= self.storages.readers(node)
            of_inputs = frozenset(key for source in node.all_input_nodes for key in self.keys_of(source))
            return StorageStep(makes={}, holds=of_inputs, private_bytes=private_bytes)
        if not self.is_moved(node):
            return step._replace(private_bytes=private_bytes)
        made = self.storages.made[node]
        keys: set[Key] = set(made)
        on = set(self.storages.keys[node]) - keys
        held: set[Key] = set()
        is_moved = False
        for source in node.all_input_nodes:
            held |= self.keys_of(source)
            shared = on & set(self.storages.keys[source])
            if shared:
                is_moved = is_moved or source in self._keys
                keys |= self._keys.get(source, shared)
        if is_moved:
            self._keys[node] = frozenset(keys)
        if step is IDLE:
            return IDLE
        return StorageStep(makes=made, holds=frozenset(held | keys), private_bytes=private_bytes)

    def _loop_step(self, loop: Loop) -> StorageStep:
        held = {key for operand in loop.inputs for key in self.keys_of(operand.node)}
        makes: dict[Key, int] = {}
        for result in loop.outputs:
            key = ("loop", result.node)
            if result.into is None:
                makes[key] = bytes_of(result.node.meta["val"])
            self._keys[result.node] = frozenset([key]) if result.into is None else self.keys_of(result.into)
            self._moved |= self.storages.readers(result.node)
        held |= {key for result in loop.outputs for key in self._keys[result.node]}
        return StorageStep(
            makes=makes, holds=frozenset(held), private_bytes=loop.memory.peak_bytes(loop.length)
        )

    def profile(self) -> Profile:
        """Return what is alive during each item."""
        steps = self.steps()
        return simulate(steps, self.kept())

    def last_used(self, at: int) -> set[Key]:
        """Return the storages, those of inputs among them, that item `at` is the last to use."""
        steps = self.steps()
        later = {key for step in steps[at + 1 :] for key in step.holds}
        return set(steps[at].holds) - later - self.kept()

    def donations(self) -> dict[fx.Node, frozenset[int]]:
        """Return the inputs of each call of an inner scope that have no later use, by position.

        There are none where gradients are recorded: autograd may need the inputs.
        """
        if self.storages.has_gradients:
            return {}
        last = self.profile().last
        found: dict[fx.Node, frozenset[int]] = {}
        for index, item in enumerate(self.items):
            if isinstance(item, Loop) or item.op != "call_module":
                continue
            inputs = slots(item)
            found[item] = frozenset(
                position
                for position, source in enumerate(inputs)
                if source.op not in {"placeholder", "get_attr"}
                and all(last.get(key) == index for key in self.keys_of(source))
                and sum(bool(self.keys_of(source) & self.keys_of(other)) for other in inputs) == 1
            )
        return found

    def seconds(self, machine: Machine) -> float:
        """Return the time of all items."""
        return sum(
            item.seconds(machine)
            if isinstance(item, Loop)
            else 0.0
            if item.target is operator.getitem
            else cost_of(item).seconds(machine)
            for item in self.items
        )


def unrolled(items: list[fx.Node | Loop]) -> list[fx.Node]:
    """Return the operators of items in an order in which they can run one by one."""
    found: list[Any] = []
    for item in items:
        found.extend(
            [node for node in item.region.members if node not in item.region.copies]
            if isinstance(item, Loop)
            else [item]
        )
    return found
