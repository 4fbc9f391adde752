"""Loops: regions with a chunk size, their inputs and outputs, and the bytes and seconds they need."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import reduce
from math import ceil
from typing import Any

import torch
from torch import Tensor, fx

from strategies.chunk.flow.axes import Axis
from strategies.chunk.flow.chunk_region import ChunkRegion
from strategies.chunk.flow.chunk_rules import slots, statistics_of
from strategies.chunk.loops.accumulating_products import PRODUCTS
from strategies.chunk.loops.score_reuse import log_softmax_over, overwritten_scores
from strategies.estimate.in_place_reuse import Overwrite
from strategies.estimate.liveness import (
    Key,
    Storages,
    StorageStep,
    key_of,
    numbers_bytes,
    simulate,
)
from strategies.estimate.machine import Machine
from strategies.estimate.operator_cost import bytes_of, cost_of

BODY_S = 2e-5
"""Seconds of one call of a body, whatever it does."""

_aten = torch.ops.aten
ADDING: Mapping[Any, Any] = {
    _aten.mm.default: _aten.addmm_.default,
    _aten.bmm.default: _aten.baddbmm_.default,
}
"""Products that can be added to a sum without memory of their own, and what does it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopInput:
    """An input of a loop: a whole value, or one chunk of it at a time.

    Fields:
        node: node that makes the value.
        axis: chunk axis; `None` for the whole value.
    """

    node: fx.Node
    axis: Axis | None

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks, without their halos."""
        whole_bytes = bytes_of(self.node.meta["val"])
        return whole_bytes if self.axis is None else self.axis.share(whole_bytes)

    @property
    def halo_bytes(self) -> int:
        """Bytes of one chunk that others have too."""
        return 0 if self.axis is None else self.axis.halo_bytes(bytes_of(self.node.meta["val"]))

    @property
    def is_copied(self) -> bool:
        """True if a chunk is copied, because it would not be dense in memory."""
        return self.axis is not None and not is_dense(self.node.meta["val"], self.axis)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopOutput:
    """An output of a loop: written one chunk at a time, or a sum over chunks.

    Fields:
        node: member that makes the value.
        axis: chunk axis; `None` for a sum over chunks.
        into: input whose buffer is reused; `None` for a new buffer.
    """

    node: fx.Node
    axis: Axis | None
    into: fx.Node | None = None

    @property
    def adds_in_place(self) -> bool:
        """True if the operator itself adds to the sum over chunks."""
        return self.axis is None and self.node.target in ADDING


@dataclass(frozen=True, kw_only=True, slots=True)
class BodyMemory:
    """The memory of a loop's body, for every chunk size.

    Fields:
        size: positions of the chunk axis.
        totals: pairs of bytes alive at one moment: those that grow with the chunk, as if it were whole, and
            those that do not. One of these moments is the peak, whatever the chunk size.
    """

    size: int
    totals: tuple[tuple[int, int], ...]

    def peak_bytes(self, length: int) -> int:
        """Return the highest total for chunks of `length`."""
        return max((growing * length // self.size + fixed for growing, fixed in self.totals), default=0)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Loop:
    """A region that runs `ceil(size / length)` times; the last chunk may be shorter.

    Fields:
        region: operators of the loop.
        size: positions of the chunk axis.
        length: positions in one chunk.
        inputs, outputs: values in the order of the region's operators.
        memory: memory of the body in forward.
        overwrites: members that overwrite an input.
        losses: members that make a loss of each row in the memory of scores, each with the logarithm of the
            softmax of these.
        backward: memory of the body in backward, which runs it again for its gradients.
        widest: axis along which an input is taken, where members need it with several halos, by need.
        unread: products that backward leaves out, because it reads their operands alone.
        kept: members among the outputs whose values backward takes, rather than compute them again.
        ahead: output for whose sum each chunk is differentiated in forward; `None`: backward runs the body
            again.
    """

    region: ChunkRegion
    size: int
    length: int
    inputs: tuple[LoopInput, ...]
    outputs: tuple[LoopOutput, ...]
    memory: BodyMemory
    overwrites: Mapping[fx.Node, Overwrite] = field(default_factory=dict)
    losses: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    backward: BodyMemory | None = None
    widest: Mapping[tuple[fx.Node, Axis | None], Axis] = field(default_factory=dict)
    unread: frozenset[fx.Node] = frozenset()
    kept: frozenset[fx.Node] = frozenset()
    ahead: fx.Node | None = None

    @property
    def chunks(self) -> int:
        """The number of runs of the body."""
        return ceil(self.size / self.length)

    def with_length(self, length: int) -> Loop:
        """Return the loop with another chunk size."""
        return replace(self, length=length)

    def local(self, node: fx.Node, slot: int) -> LoopInput | None:
        """Return what input `slot` of a member takes from outside; `None` for what the body makes."""
        source, need = slots(node)[slot], self.region.needs[node][slot]
        made = self.region.axes.get(source)
        if need is not None and made and (node.target is operator.getitem or made[0].covers(need)):  # type: ignore[union-attr]
            return None
        return LoopInput(node=source, axis=self.widest.get((source, need), need))

    def keeps(self) -> tuple[LoopInput, ...]:
        """Return what backward takes of each kept value, in the order of the outputs."""
        kept = (result.node for result in self.outputs if result.node in self.kept)
        return tuple(LoopInput(node=node, axis=self.region.axes[node][0]) for node in kept)

    def updates(self, operand: LoopInput) -> bool:
        """Return whether members write to an input, running statistics that nobody else takes."""
        return any(operand.node in statistics_of(member) for member in self.region.members)

    def adds_gradients(self, node: fx.Node) -> bool:
        """Return whether a member is one of `PRODUCTS` of which every chunk takes one operand whole."""
        if not is_product(node):
            return False
        factors = (self.local(node, slot) for slot in range(len(slots(node)))[-2:])
        return any(factor is not None and factor.axis is None for factor in factors)

    def overwriting(self, known: Mapping[fx.Node, Overwrite]) -> dict[fx.Node, Overwrite]:
        """Return those of `known` that overwrite only values that the body has made."""
        members = set(self.region.members)
        found = ((node, known[node]) for node in self.region.members if node in known)
        return {node: each for node, each in found if each.over <= members and self._is_local(node, each)}

    def _is_local(self, node: fx.Node, overwrite: Overwrite) -> bool:
        """Return whether all memory that an operator overwrites is of the chunk at hand."""
        return self.local(node, 0) is None and all(
            self.local(view, slot) is None
            for view in overwrite.over
            for slot, source in enumerate(slots(view))
            if source in overwrite.over
        )

    def body_steps(
        self, storages: Storages, *, is_writing: bool
    ) -> tuple[list[StorageStep], list[StorageStep]]:
        """Return the steps of the body, once for storages that grow with the chunk and once for the others.

        Sizes of the growing storages are those of the whole values.

        Args:
            storages: storages of the graph.
            is_writing: whether sums of matrix products are added up in place, rather than returned. Where
                backward runs them again nothing is overwritten, and no body has `overwrites`.
        """
        on = self._lying_on(storages)
        copied = self._copied_spans()
        given = {result.node for result in self.outputs}
        in_place = self._in_place(is_writing=is_writing)
        growing: list[StorageStep] = []
        fixed: list[StorageStep] = []

        def step(
            held: set[Key], grown: Mapping[Key, int], stays: Mapping[Key, int], private_bytes: int = 0
        ) -> None:
            growing.append(StorageStep(makes=grown, holds=frozenset(held)))
            fixed.append(StorageStep(makes=stays, holds=frozenset(held), private_bytes=private_bytes))

        for index, node in enumerate(self.region.members):
            for operand, span in copied.items():
                if span[0] == index:
                    step(set(), {operand: operand.nbytes}, {operand: operand.halo_bytes})
            own: set[Key] = {*on[node], *self._aliased(node, copied, storages)}
            held = own | {operand for operand, span in copied.items() if span[0] <= index <= span[1]}
            for source in self.local_sources(node):
                held.update(on[source], self._aliased(source, copied, storages))
            grown, stays = ({}, {}) if node in in_place else self._made(node, storages)
            step(held, grown, stays, numbers_bytes(node.target, node.args))
            if node in given:
                step(own, {}, {})
        return growing, fixed

    def _copied_spans(self) -> dict[LoopInput, tuple[int, int]]:
        """Return the positions of the first and the last member that use each copied chunk."""
        spans: dict[LoopInput, tuple[int, int]] = {}
        for index, _, operand in self._uses():
            if operand.is_copied:
                spans[operand] = spans.get(operand, (index, index))[0], index
        return spans

    def _in_place(self, *, is_writing: bool) -> AbstractSet[fx.Node]:
        """Return the members that make no storage: they overwrite an input, add to a sum, or are left out."""
        if not is_writing:
            views = (each.node for each in self.keeps() if not each.is_copied)
            return (self.unread - self.kept).union(self.overwrites, views)
        return {result.node for result in self.outputs if result.adds_in_place}.union(self.overwrites)

    def local_sources(self, node: fx.Node) -> list[fx.Node]:
        """Return the inputs of a member that the body makes itself."""
        return [source for slot, source in enumerate(slots(node)) if self.local(node, slot) is None]

    def _lying_on(self, storages: Storages) -> dict[fx.Node, set[Key]]:
        """Return the storages of the members' values where some overwrite others."""
        same: dict[Key, Key] = {}
        found: dict[fx.Node, set[Key]] = {}
        for node in self.region.members:
            overwrite = self.overwrites.get(node)
            if overwrite is not None:
                (key,) = found[slots(node)[0]]
                same |= dict.fromkeys(storages.made[node], key)
            found[node] = {same.get(key, key) for key in storages.keys[node]}
        return found

    def _made(self, node: fx.Node, storages: Storages) -> tuple[dict[Key, int], dict[Key, int]]:
        """Return the storages that a member makes: those that grow with the chunk, and those that do not."""
        value = node.meta["val"]
        outputs = value if isinstance(value, tuple | list) else (value,)
        cut = {
            key_of(output): axis
            for output, axis in zip(outputs, self.region.axes[node], strict=False)
            if axis is not None
        }
        made = storages.made[node].items()
        growing: dict[Key, int] = {key: cut[key].share(size) for key, size in made if key in cut}
        fixed = {key: cut[key].halo_bytes(size) if key in cut else size for key, size in made}
        return growing, {key: size for key, size in fixed.items() if size or key not in cut}

    def _aliased(self, node: fx.Node, copied: Iterable[LoopInput], storages: Storages) -> Iterator[LoopInput]:
        """Yield the copied chunks that a member's value lies on."""
        on = set(storages.keys[node])
        return (operand for operand in copied if on & set(storages.keys[operand.node]))

    def _uses(self) -> Iterator[tuple[int, fx.Node, LoopInput]]:
        for index, node in enumerate(self.region.members):
            for slot in range(len(slots(node))):
                operand = self.local(node, slot)
                if operand is not None:
                    yield index, node, operand

    def body(self, storages: Storages) -> BodyMemory:
        """Return the memory of the body."""
        growing, fixed = (
            simulate(steps, ()).live_bytes for steps in self.body_steps(storages, is_writing=True)
        )
        return BodyMemory(size=self.size, totals=undominated(zip(growing, fixed, strict=True)))

    def seconds(self, machine: Machine, *, is_again: bool = False) -> float:
        """Return the time of all runs, or where `is_again` of those in backward."""
        share = self.length / self.size
        body = sum(
            cost_of(node).seconds(machine, share=share * self._repeated(node))
            for node in self.region.members
            if node.target is not operator.getitem and not (is_again and node in self.unread)
        )
        copied = sum(bytes_of(result.node.meta["val"]) for result in self.outputs)
        copied += sum(operand.nbytes for operand in (*self.inputs, *self.keeps()) if operand.is_copied)
        return self.chunks * (body + BODY_S) + 2 * copied / machine.bytes_per_s

    def _repeated(self, node: fx.Node) -> float:
        """Return the rows that a member makes in one chunk / those that belong to the chunk."""
        axes = self.region.axes[node]
        axis = axes[0] if axes else None
        return 1.0 if axis is None else 1.0 + (axis.low + axis.high) / (axis.inner * self.length)


def is_product(node: fx.Node) -> bool:
    """Return whether a node is one of `PRODUCTS`; a bias is a vector."""
    if node.target not in PRODUCTS or node.kwargs:
        return False
    inputs = slots(node)
    return len(inputs) < 3 or (len(node.args) == 3 and inputs[0].meta["val"].dim() == 1)  # noqa: PLR2004


def undominated(totals: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the totals that no other total exceeds in both parts."""
    found: list[tuple[int, int]] = []
    for growing, fixed in sorted(set(totals), reverse=True):
        if not found or fixed > found[-1][1]:
            found.append((growing, fixed))
    return tuple(found)


def make_loop(
    region: ChunkRegion,
    outside: AbstractSet[fx.Node],
    length: int,
    storages: Storages,
    kept: frozenset[fx.Node] = frozenset(),
) -> Loop | None:
    """Return a region as a loop, or `None` where a value that is used outside cannot be put together.

    Args:
        region: region to run in chunks.
        outside: every value that is used outside of the region.
        length: length of one chunk.
        storages: storages of the graph.
        kept: members whose values backward does not compute again.
    """
    outside = outside | kept
    outputs = _outputs(region, outside)
    size = next((axis.size for axes in region.needs.values() for axis in axes if axis is not None), 0)
    if not outputs or size < 2:  # noqa: PLR2004 (there is nothing to cut)
        return None
    empty = BodyMemory(size=size, totals=())
    loop = Loop(
        region=region,
        size=size,
        length=length,
        inputs=(),
        outputs=tuple(outputs),
        memory=empty,
        widest=_widest(region),
        kept=kept,
    )
    inputs = dict.fromkeys(operand for _, _, operand in loop._uses())  # noqa: SLF001 (its own maker)
    chains = _overwritten_scores(loop, outside)
    over = {chain[0]: Overwrite(log_softmax_over, frozenset(chain[1:])) for chain in chains.values()}
    loop = replace(
        loop,
        inputs=tuple(inputs),
        overwrites=loop.overwriting(storages.overwrites) | over,
        losses={loss: chain[0] for loss, chain in chains.items()},
    )
    return replace(loop, memory=loop.body(storages))


def _widest(region: ChunkRegion) -> dict[tuple[fx.Node, Axis | None], Axis]:
    """Return the axes with which inputs are taken that members need with several halos, by value and need."""
    needed: dict[tuple[fx.Node, Axis], set[Axis]] = {}
    for node in region.members:
        for source, need in zip(slots(node), region.needs[node], strict=True):
            if need is not None:
                needed.setdefault((source, need.core), set()).add(need)
    return {
        (source, need): reduce(Axis.with_halo_of, needs)
        for (source, _), needs in needed.items()
        if len(needs) > 1
        for need in needs
    }


def _overwritten_scores(loop: Loop, outside: AbstractSet[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Return the members that make a loss of each row, with the values whose memory they may share."""
    members = set(loop.region.members) - loop.region.copies - outside

    def is_inside(node: fx.Node) -> bool:
        """Return whether all of what `node` gives stays inside of one chunk."""
        is_made = node in members and all(
            loop.local(user, slot) is None
            for user in node.users
            if user in members
            for slot, source in enumerate(slots(user))
            if source is node
        )
        return is_made and members.issuperset(node.users)

    found = ((node, overwritten_scores(node, is_inside)) for node in loop.region.members)
    return {node: chain for node, chain in found if chain is not None}


def _outputs(region: ChunkRegion, outside: AbstractSet[fx.Node]) -> list[LoopOutput]:
    """Return what members make for others; nothing where one of these values cannot be put together."""
    members = set(region.members)
    used = [
        node
        for node in region.members
        if node not in region.copies and (node in outside or not members.issuperset(node.users))
    ]
    if not all(can_be_put_together(region, node) for node in used):
        return []
    axes = [region.axes[node] for node in used]
    return [
        LoopOutput(node=node, axis=each[0].core if each and each[0] else None)
        for node, each in zip(used, axes, strict=True)
    ]


def can_be_put_together(region: ChunkRegion, node: fx.Node) -> bool:
    """Return whether a buffer can hold what all chunks make of the value of a member."""
    axes = region.axes[node]
    return isinstance(node.meta["val"], Tensor) and all(axis and axis.is_complete for axis in axes[:1])


def is_dense(tensor: Tensor, axis: Axis) -> bool:
    """Return whether a chunk of `tensor` lies in one piece: the axis is the slowest of all."""
    if axis.outer(tensor.shape) != 1:
        return False
    stride = tensor.stride(axis.dims[-1])
    sizes = enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    return all(other <= stride for dim, (size, other) in sizes if size > 1 and dim not in axis.dims)


def chunk_sizes(size: int) -> list[int]:
    """Return the chunk sizes that are tried for an axis, largest first."""
    found = {1, size}
    for parts in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048):
        length = ceil(size / parts)
        found.add(32 * ceil(length / 32) if length >= 64 else length)  # noqa: PLR2004 (whole vectors)
    return sorted((length for length in found if length <= size), reverse=True)
