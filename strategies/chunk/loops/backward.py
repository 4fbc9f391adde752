"""Liveness of forward and backward of a schedule: an estimate that guides the search.

A rehearsal of the planned model on tensors without memory measures the exact bytes afterwards. In the
estimate the gradient of a storage is as large as the storage. It is allocated by the first operator of
backward that produces it, and freed by the backward of the operator that made the storage. Temporary memory
of backward operators and gradients of parameters are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from strategies.chunk.flow.chunk_rules import slots
from strategies.chunk.loops.gradients_ahead import summed_up
from strategies.chunk.loops.loop import BodyMemory, Loop, undominated
from strategies.chunk.loops.read_again import unread_products
from strategies.chunk.loops.schedule import Schedule
from strategies.estimate.liveness import (
    IDLE,
    Key,
    Profile,
    Storages,
    StorageStep,
    gradient_of,
    key_of,
    simulate,
)
from strategies.estimate.machine import Machine
from strategies.estimate.operator_cost import bytes_of, cost_of, is_view, remembered, tensors_of

BACKWARD_SHARE = 2.0
"""Time of an operator's backward / time of its forward."""


class SavedFate(Enum):
    """The place of the tensors that autograd saves of a scope, between forward and backward."""

    KEPT = auto()
    RECOMPUTED = auto()  # nowhere: its forward runs again
    OFFLOADED = auto()  # in host memory


@dataclass(frozen=True, kw_only=True, slots=True)
class ScopeCall:
    """Forward and backward of an inner scope, as the scope around it sees them; outputs are not counted.

    Fields:
        saved_bytes: bytes kept between forward and backward.
        forward_bytes, backward_bytes: highest totals during each.
        gradient_bytes: gradients of the scope's inputs, which `backward_bytes` leaves out.
        seconds: time of both.
    """

    saved_bytes: int
    forward_bytes: int
    backward_bytes: int
    gradient_bytes: int
    seconds: float


def saved_storages(graph: fx.Graph) -> dict[fx.Node, frozenset[Key]]:
    """Return the storages that autograd keeps for the gradient of each node of a graph recorded with it."""
    return {node: frozenset(_saved(node)) for node in graph.nodes}


def _saved(node: fx.Node) -> Iterable[Key]:
    """Yield the storages that the autograd function of a node has saved."""
    function = next((tensor.grad_fn for tensor in tensors_of(node) if tensor.grad_fn is not None), None)
    function = node.meta.get("grad_fn", function)  # of a tensor that was written in place later
    if function is None or node.op != "call_function":
        return
    for name in dir(function):
        if name.startswith("_saved_"):
            try:
                saved = getattr(function, name)
            except RuntimeError:  # it was written in place since, as nobody will read it
                continue
            yield from (key_of(each) for each in tree_leaves(saved) if isinstance(each, Tensor))


def unread_loops(schedule: Schedule, saves: Mapping[fx.Node, frozenset[Key]]) -> list[Loop]:
    """Return the loops whose outputs, and all values computed from them, autograd saves nothing of."""
    loops = [item for item in schedule.items if isinstance(item, Loop)]
    inside = {node for loop in loops for node in loop.region.members}

    def is_unread(loop: Loop) -> bool:
        """Return whether no backward reads its results, or views of them."""
        if loop.kept:
            return False
        reached = [result.node for result in loop.outputs]
        for node in reached:  # grows
            users = [user for user in node.users if user not in loop.region.members]
            if any(user in inside or saves.get(user) for user in users):
                return False
            reached += [user for user in users if user not in reached]
        return True

    return [loop for loop in loops if is_unread(loop)]


@remembered
def has_gradient(node: fx.Node) -> bool:
    """Return whether backward computes a gradient for the value of a node, those of parameters left out.

    The gradient of a view of a parameter is a view of the parameter's.
    """
    some = any(tensor.requires_grad for tensor in tensors_of(node))
    return bool(node.meta.get("requires_grad", some)) and not _is_parameter(node)


def _is_parameter(node: fx.Node) -> bool:
    while node.op == "call_function" and is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node.op == "get_attr"


def differentiable(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes whose values depend on what requires a gradient, and not through `detach` alone.

    Values of operators that the recorder has put in place of others do not say it themselves.
    """
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if any(tensor.requires_grad for tensor in tensors_of(node)) or (
            node.target is not torch.ops.aten.detach.default and not found.isdisjoint(node.all_input_nodes)
        ):
            found.add(node)
    return found


class _Backward(NamedTuple):
    """The backward of an operator whose inputs and outputs no loop makes.

    Fields:
        given: gradients of its outputs.
        wanted: gradients of its inputs, with their bytes.
        saved: storages that autograd keeps for it.
    """

    given: frozenset[Key]
    wanted: tuple[tuple[Key, int], ...]
    saved: frozenset[Key]


@dataclass(kw_only=True, slots=True)
class TrainingPass:
    """Forward and backward of a schedule.

    Fields:
        schedule: schedule of forward, without buffer reuse.
        saves: storages that autograd keeps, by node.
        calls: passes of inner scopes.
        tail_bytes: bytes that the loss holds while it is computed, without its input.
        starts_backward: whether backward starts from the outputs of the schedule.

    All passes of one graph share the last two fields, which remember what does not depend on the schedule.
    """

    schedule: Schedule
    saves: Mapping[fx.Node, frozenset[Key]]
    calls: Mapping[fx.Node, ScopeCall]
    tail_bytes: int = 0
    starts_backward: bool = False
    _backwards: dict[fx.Node, _Backward] = field(default_factory=dict)
    _seconds: dict[fx.Node | Loop, float] = field(default_factory=dict)

    def profile(self) -> Profile:
        """Return what is alive in forward by item, with the loss, and in backward by item, the last first."""
        schedule = self.schedule
        forward = schedule.steps()
        kept = schedule.kept()
        for index, item in enumerate(schedule.items):
            if not isinstance(item, Loop) and item in self.calls:
                call, step = self.calls[item], forward[index]
                more = call.forward_bytes - call.saved_bytes
                forward[index] = step._replace(
                    makes={**step.makes, ("saved", item): call.saved_bytes}, private_bytes=more
                )
        sizes: dict[Key, int] = {}
        for step in forward:
            sizes |= step.makes
        born: set[Key] = set()
        for index, item in enumerate(schedule.items):
            if isinstance(item, Loop) and item.ahead is not None:
                made = self._gradients([operand.node for operand in item.inputs], born, sizes)
                forward[index] = forward[index]._replace(makes={**forward[index].makes, **made})
        gradients = self._gradients(schedule.outputs, born, sizes)
        steps = [*forward, StorageStep(makes=gradients, holds=frozenset(kept), private_bytes=self.tail_bytes)]
        steps += [
            IDLE if step is IDLE and not self.saves[item] else self._backward(item, step, born, sizes)  # type: ignore[index]
            for item, step in zip(reversed(schedule.items), reversed(forward), strict=True)
        ]
        return simulate(steps, ())

    def seconds(self, machine: Machine) -> float:
        """Return the time of forward and backward; a pass is asked for one machine only."""
        known, calls, total = self._seconds, self.calls, 0.0
        for item in self.schedule.items:
            if item in calls:
                total += calls[item].seconds  # type: ignore[index]
                continue
            if item not in known:
                known[item] = _seconds_of(item, machine)
            total += known[item]
        return total

    def as_call(self, machine: Machine, after: SavedFate = SavedFate.KEPT) -> ScopeCall:
        """Return the pass as the scope around it sees it.

        Args:
            machine: whose time is told.
            after: where forward leaves what autograd saves of it.
        """
        profile, count = self.profile(), len(self.schedule.items)
        results = sum(
            size
            for step in self.schedule.steps()
            for key, size in step.makes.items()
            if key in self.schedule.kept()
        )
        given = [node for node in self.schedule.graph.find_nodes(op="placeholder") if has_gradient(node)]
        gradient_bytes = sum(bytes_of(node.meta["val"]) for node in given)
        if after is not SavedFate.KEPT:
            again = 0.0
            if after is SavedFate.RECOMPUTED:
                skipped = sum(loop.seconds(machine) for loop in unread_loops(self.schedule, self.saves))
                again = self.schedule.seconds(machine) - skipped
            return ScopeCall(
                saved_bytes=0,
                forward_bytes=self.schedule.profile().peak_bytes - results,
                backward_bytes=profile.peak_bytes - results - gradient_bytes,
                gradient_bytes=gradient_bytes,
                seconds=self.seconds(machine) + again,
            )
        return ScopeCall(
            saved_bytes=max(profile.before_bytes[count] - results, 0),
            forward_bytes=max(profile.live_bytes[:count], default=0) - results,
            backward_bytes=max(profile.live_bytes[count + 1 :], default=0) - results - gradient_bytes,
            gradient_bytes=gradient_bytes,
            seconds=self.seconds(machine),
        )

    def _gradients(
        self, nodes: Iterable[fx.Node], born: set[Key], sizes: Mapping[Key, int]
    ) -> dict[Key, int]:
        """Return the gradients that are born for values of `nodes`."""
        made: dict[Key, int] = {}
        for node in nodes:
            if not has_gradient(node):
                continue
            for key in self.schedule.keys_of(node):
                gradient = gradient_of(key)
                if gradient not in born:
                    born.add(gradient)
                    made[gradient] = sizes[key] if key in sizes else bytes_of(node.meta["val"])
        return made

    def _backward(
        self, item: fx.Node | Loop, forward: StorageStep, born: set[Key], sizes: Mapping[Key, int]
    ) -> StorageStep:
        """Return the step of backward that belongs to an item of forward.

        `born` are gradients that are alive.
        """
        if isinstance(item, Loop):
            return self._loop_backward(item, born, sizes)
        if item in self.calls or self.schedule.is_moved(item):
            return self._node_backward(item, forward, born, sizes)
        if item not in self._backwards:
            self._backwards[item] = self._alone(item)
        given, wanted, saved = self._backwards[item]
        makes = {key: size for key, size in wanted if key not in born}
        held = saved | (given & born)
        born.update(makes)
        return StorageStep(makes=makes, holds=held)

    def _alone(self, item: fx.Node) -> _Backward:
        """Return the backward of a node whose values lie on the storages of the graph."""
        storages = self.schedule.storages
        wanted = {
            gradient_of(key): storages.size(key, bytes_of(node.meta["val"]))
            for node in item.all_input_nodes
            if has_gradient(node)
            for key in storages.keys[node]
        }
        of_inputs = {key for node in item.all_input_nodes for key in storages.keys[node]}
        return _Backward(
            given=frozenset(gradient_of(key) for key in storages.keys[item]),
            wanted=tuple(wanted.items()),
            saved=self.saves[item] & (of_inputs | set(storages.made[item])),
        )

    def _node_backward(
        self, item: fx.Node, forward: StorageStep, born: set[Key], sizes: Mapping[Key, int]
    ) -> StorageStep:
        """Return the step of backward of a call, or of a node whose storages chunks have moved."""
        inputs = item.all_input_nodes
        held = born & {gradient_of(key) for key in self.schedule.keys_of(item)}
        makes = self._gradients(inputs, born, sizes)
        if item in self.calls:
            call = self.calls[item]
            held |= {("saved", item), *(key for node in inputs for key in self.schedule.keys_of(node))}
            private = max(call.backward_bytes - call.saved_bytes, 0)
            private += max(call.gradient_bytes - sum(makes.values()), 0)  # added to those that exist already
            return StorageStep(makes=makes, holds=frozenset(held), private_bytes=private)
        for node in inputs:
            if self.saves[item] & set(self.schedule.storages.keys[node]):
                held |= self.schedule.keys_of(node)
        return StorageStep(makes=makes, holds=frozenset(held | (self.saves[item] & set(forward.makes))))

    def _loop_backward(self, loop: Loop, born: set[Key], sizes: Mapping[Key, int]) -> StorageStep:
        """Return the step of backward of a loop, which recomputes its chunks."""
        assert loop.backward is not None
        inputs = [operand.node for operand in loop.inputs]
        held = born & {
            gradient_of(key) for result in loop.outputs for key in self.schedule.keys_of(result.node)
        }
        if loop.ahead is not None:  # these gradients are there since forward
            held |= born & {gradient_of(key) for node in inputs for key in self.schedule.keys_of(node)}
            return StorageStep(makes={}, holds=frozenset(held))
        makes = self._gradients(inputs, born, sizes)
        held |= {key for node in (*inputs, *loop.kept) for key in self.schedule.keys_of(node)}
        # it has a gradient of its own for each input, which is added to what there is of its storage
        own = sum(bytes_of(node.meta["val"]) for node in inputs if has_gradient(node))
        private = loop.backward.peak_bytes(loop.length) + max(own - sum(makes.values()), 0)
        return StorageStep(makes=makes, holds=frozenset(held), private_bytes=private)


def _seconds_of(item: fx.Node | Loop, machine: Machine) -> float:
    """Return the time of forward and backward of one item that is no call."""
    if isinstance(item, Loop):
        again = item.seconds(machine, is_again=True) if item.ahead is None else 0.0
        return item.seconds(machine) * (1 + BACKWARD_SHARE) + again
    return cost_of(item).seconds(machine) * (1 + BACKWARD_SHARE) if item.op == "call_function" else 0.0


def with_backward(
    loop: Loop,
    storages: Storages,
    saves: Mapping[fx.Node, frozenset[Key]],
    final: Collection[fx.Node] = (),
) -> Loop | None:
    """Return the loop with the memory of its body's backward, which may come in forward.

    `None` where it would save what an operator writes to: backward may come after the write.

    Args:
        loop: a loop of a graph that was recorded with gradients.
        storages: storages of the graph.
        saves: storages that autograd keeps, by node.
        final: differentiable values of a graph from whose outputs backward starts; else none.
    """
    if any(operand.node.meta.get("written", False) and not loop.updates(operand) for operand in loop.inputs):
        return None
    loop = replace(loop, ahead=None if loop.kept else summed_up(loop, final))
    loop = replace(loop, unread=unread_products(loop, storages, saves))
    forward = loop.body_steps(storages, is_writing=False)
    places = _gradients_over_scores(loop, storages)
    totals: list[Sequence[int]] = []
    for steps, grows in zip(forward, (True, False), strict=True):
        born: set[Key] = set(places)
        backward = [
            _member_backward(loop, node, storages, saves[node], born, grows=grows)
            for node in reversed(loop.region.members)
        ]
        placed = [
            step._replace(holds=frozenset(places.get(key, key) for key in step.holds)) for step in backward
        ]
        totals.append(simulate([*steps, *placed], ()).live_bytes)
    memory = BodyMemory(size=loop.size, totals=undominated(zip(*totals, strict=True)))
    if loop.ahead is not None:
        return replace(loop, memory=memory, backward=BodyMemory(size=loop.size, totals=()))
    return replace(loop, backward=memory)


def _gradients_over_scores(loop: Loop, storages: Storages) -> dict[Key, Key]:
    """Return the gradients that lie in the memory of a loss's scores, each with this storage."""
    found: dict[Key, Key] = {}
    for logarithms in loop.losses.values():
        (scores,) = storages.keys[slots(logarithms)[0]]
        found |= {gradient_of(key): scores for key in (*storages.keys[logarithms], scores)}
    return found


def _member_backward(
    loop: Loop, node: fx.Node, storages: Storages, saved: frozenset[Key], born: set[Key], *, grows: bool
) -> StorageStep:
    """Return the backward of a member: of gradients that grow with the chunk, or of those that do not.

    Args:
        loop: whose body has the member.
        node: the member.
        storages: storages of the graph.
        saved: storages that autograd keeps for the member.
        born: gradients that exist already; those of the step are added.
        grows: whether gradients that grow with the chunk are meant.
    """
    held = born.intersection(map(gradient_of, storages.keys[node]))
    inside = set(slots(node)).intersection(loop.region.members)
    kept = {key for source in inside for key in storages.keys[source]}
    makes: dict[Key, int] = {}
    for slot, source in enumerate(slots(node)):
        operand = loop.local(node, slot)
        if operand is not None and operand.axis is None:
            if not grows and _makes_whole_gradient(loop, node, source):
                makes["gradient", source, node] = bytes_of(source.meta["val"])
        elif has_gradient(source) and bool(loop.region.axes[node]) is grows:
            makes |= _new_gradients(source, storages, born)
            born.update(makes)
    holds = held.union(saved & kept.union(storages.keys[node]))
    return StorageStep(makes=makes, holds=frozenset(holds))


def _new_gradients(source: fx.Node, storages: Storages, born: set[Key]) -> dict[Key, int]:
    """Return the gradients of a value that do not exist yet, with their bytes."""
    sizes, size = storages.made.get(source, {}), bytes_of(source.meta["val"])
    gradients = {gradient_of(key): sizes.get(key, size) for key in storages.keys[source]}
    return {key: size for key, size in gradients.items() if key not in born}


def _makes_whole_gradient(loop: Loop, node: fx.Node, source: fx.Node) -> bool:
    """Say if each chunk makes a gradient for all of an input, rather than add to its total at once."""
    return source.meta["val"].requires_grad and not loop.adds_gradients(node)
