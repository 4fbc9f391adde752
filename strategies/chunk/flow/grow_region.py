"""Region growth: from one chunked value to all operators around it that can run in the same loop.

Growth goes both ways. Backwards it asks what a chunk needs: a chunk of an input, or the whole input.
Forwards it asks which users of a chunk can work on chunks. A value that is needed whole is computed before
the loop, with everything it depends on. If a cheap operator is needed both whole and in chunks, it runs in
both places.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, fx

from strategies.chunk.flow.axes import Axis, whole
from strategies.chunk.flow.chunk_region import Axes, ChunkRegion, RegionSeed
from strategies.chunk.flow.chunk_rules import (
    cuts_pictures,
    groups_of,
    inputs_for,
    is_random,
    output_for,
    shape_of,
    slots,
    sums,
    window_of,
)
from strategies.chunk.flow.row_window import ROWS
from strategies.estimate.operator_cost import is_view, remembered
from strategies.tracing.channel_norms import norm_sums

_ATTEMPTS = 12
_FAR = 6  # operators between a view that merges dimensions and a seed


@dataclass(slots=True)
class _Decided:
    """The decisions so far.

    Fields:
        axes, needs: axes of the outputs and of the inputs of members, in the order in which these joined.
        firm: bit mask of the members that must not also run in front of the loop.
        before: bit mask of the nodes that must run in front of the loop.
    """

    axes: dict[fx.Node, Axes] = field(default_factory=dict)
    needs: dict[fx.Node, Axes] = field(default_factory=dict)
    firm: int = 0
    before: int = 0
    _earlier: list[tuple[fx.Node, Axes | None, Axes]] = field(default_factory=list)

    def decide(self, node: fx.Node, outs: Axes, ins: Axes) -> None:
        """Make a node a member, or give a member other axes."""
        self._earlier.append((node, self.axes.get(node), self.needs.get(node, ())))
        self.axes[node], self.needs[node] = outs, ins

    def mark(self) -> tuple[int, int, int]:
        """Return what `undo_to` needs to forget all decisions from now on."""
        return len(self._earlier), self.firm, self.before

    def undo_to(self, mark: tuple[int, int, int]) -> None:
        """Forget everything decided since `mark`."""
        count, self.firm, self.before = mark
        while len(self._earlier) > count:
            node, outs, ins = self._earlier.pop()
            if outs is None:
                del self.axes[node], self.needs[node]
            else:
                self.axes[node], self.needs[node] = outs, ins


class RegionGrower:
    """Grows regions of one window.

    Args:
        window: nodes in order, results of several tensors together with the `getitem` of each.
        may_copy: whether a node may run twice, in front of the loop and in it.
        may_overlap: whether pictures may be cut inside: along rows, with a halo, and through norms.
    """

    def __init__(
        self, window: Sequence[fx.Node], may_copy: Callable[[fx.Node], bool], *, may_overlap: bool = True
    ) -> None:
        self._window = window
        self._may_copy = may_copy
        self._may_overlap = may_overlap
        self._inside = {node: index for index, node in enumerate(window)}
        self._ancestors: dict[fx.Node, int] = {}
        self._outside: set[fx.Node] = set()
        self._never = {node for node in window if is_random(node) or node.meta.get("written", False)}
        self._free = {node for node in window if is_view(node) or may_copy(node)}
        for index, node in enumerate(window):
            mask = 1 << index
            for source in node.all_input_nodes:
                mask |= self._ancestors.get(source, 0)
            self._ancestors[node] = mask

    def region(self, seed: RegionSeed) -> ChunkRegion | None:
        """Return the largest region around `seed`, or `None` where there is none."""
        self._outside = set(self._never)
        for _ in range(_ATTEMPTS):
            state = _Decided()
            if not self._start(seed, state):
                return None
            conflicts = state.firm & state.before
            if conflicts >> self._inside[seed.node] & 1:
                return None
            if not conflicts:
                self._extend(state)
                return self._finished(state, seed)
            self._outside.update(node for node in state.axes if conflicts >> self._inside[node] & 1)
        return None

    def _start(self, seed: RegionSeed, state: _Decided) -> bool:
        """Enter the seed and what it needs; return whether that is possible."""
        if seed.node in self._outside or not (
            self._may_overlap or seed.axis or seed.node.target is not norm_sums
        ):
            return False
        if seed.axis is not None:
            return self._demand(seed.node, seed.axis, state) and seed.node in state.axes
        self._enter(seed.node, (), seed.ins, state)
        return all(
            self._take(source, axis, state) for source, axis in zip(slots(seed.node), seed.ins, strict=True)
        )

    def _enter(self, node: fx.Node, outs: Axes, ins: Axes, state: _Decided) -> None:
        state.decide(node, outs, ins)
        if node not in self._free:
            state.firm |= 1 << self._inside[node]

    def _demand(self, node: fx.Node, axis: Axis, state: _Decided) -> bool:
        """Make a chunk of `node` available in the loop; false if members need it along another axis."""
        if node.target is not operator.getitem or isinstance(node.args[0].meta["val"], Tensor):  # type: ignore[union-attr]
            return self._demand_output(node, 0, axis, state)
        if node in state.axes and _covers(state.axes[node], 0, axis):
            return True
        maker, index = node.args
        if not self._demand_output(maker, index, axis, state):  # type: ignore[arg-type]
            return False
        if maker in state.axes:
            made = state.axes[maker][index]  # type: ignore[index]
            self._enter(node, (made,), (made,), state)
        else:
            state.before |= self._ancestors.get(node, 0)
        return True

    def _demand_output(self, node: fx.Node, index: int, axis: Axis, state: _Decided) -> bool:
        """Return whether output `index` of `node` can be had along `axis`, in chunks or as a whole."""
        if node in state.axes:
            return _covers(state.axes[node], index, axis) or self._widen(node, index, axis, state)
        is_cut = node in self._inside and node not in self._outside
        is_cut = is_cut and (self._may_overlap or not cuts_pictures(node, axis))
        found = inputs_for(node, index, axis) if is_cut else None
        if found is not None:
            ins, outs = found
            earlier = state.mark()
            self._enter(node, outs, ins, state)
            if all(self._take(source, need, state) for source, need in zip(slots(node), ins, strict=True)):
                return True
            state.undo_to(earlier)  # its inputs are cut in another way: a chunk of its whole value will do
        state.before |= self._ancestors.get(node, 0)
        return True

    def _widen(self, node: fx.Node, index: int, axis: Axis, state: _Decided) -> bool:
        """Give the chunks of a member a halo that its users need; false where they need another axis."""
        made = state.axes[node][index] if index < len(state.axes[node]) else None
        if made is None or made.core != axis.core:
            return False
        found = inputs_for(node, index, made.with_halo_of(axis))
        if found is None:
            return False
        ins, outs = found
        earlier = state.mark()
        self._enter(node, outs, ins, state)
        for part in (user for user in node.users if user.target is operator.getitem and user in state.axes):
            self._joins_as_part(part, state)
        if all(self._take(source, need, state) for source, need in zip(slots(node), ins, strict=True)):
            return True
        state.undo_to(earlier)
        return False

    def _take(self, source: fx.Node, axis: Axis | None, state: _Decided) -> bool:
        if axis is not None:
            return self._demand(source, axis, state)
        state.before |= self._ancestors.get(source, 0)
        return True

    def _extend(self, state: _Decided) -> None:
        """Add the users of chunks that can work on chunks."""
        users = [node for node in self._window if node.op == "call_function" and node not in self._outside]
        is_growing = True
        while is_growing:
            is_growing = False
            for node in users:
                if node not in state.axes and self._joins(node, state):
                    is_growing = True

    def _joins(self, node: fx.Node, state: _Decided) -> bool:
        """Make `node` a member where it can be one."""
        if node.target is operator.getitem:
            return self._joins_as_part(node, state)
        for slot, source in enumerate(slots(node)):
            given = state.axes.get(source)
            if not given or given[0] is None or state.before >> self._inside[source] & 1:
                continue
            for axis in output_for(node, slot, given[0].core):
                earlier = state.mark()
                is_member = self._demand_output(node, 0, axis, state) and node in state.axes
                if is_member and not state.firm & state.before:
                    return True
                state.undo_to(earlier)
        return False

    def _joins_as_part(self, node: fx.Node, state: _Decided) -> bool:
        """Enter one of several results where its maker is cut, in the same way; return whether it is."""
        maker, index = node.args
        outs = state.axes.get(maker, ())  # type: ignore[arg-type]
        axis = outs[index] if isinstance(index, int) and index < len(outs) else None
        if axis is not None:
            self._enter(node, (axis,), (axis,), state)
        return axis is not None

    def _finished(self, state: _Decided, seed: RegionSeed) -> ChunkRegion | None:
        """Return the region that was decided, `None` where it would run in another order than the graph."""
        members = [node for node in self._window if node in state.axes]
        copies = frozenset(node for node in members if state.before >> self._inside[node] & 1)
        own = sum(1 << self._inside[node] for node in members if node not in copies)
        before, after = self._around(own, state)
        if not own or any(self._ancestors[node] & own for node in before):
            return None
        if not self._draws_in_order([*before, *after]):
            return None
        needed = _without_idle(members, copies)
        return ChunkRegion(
            members=needed,
            axes={node: state.axes[node] for node in needed},
            needs={node: state.needs[node] for node in needed},
            before=before,
            after=after,
            copies=copies & set(needed),
            window=self._window,
            seed=seed,
            may_copy=self._may_copy,
            may_overlap=self._may_overlap,
        )

    def _draws_in_order(self, nodes: Sequence[fx.Node]) -> bool:
        drawn = [self._inside[node] for node in nodes if is_random(node)]
        return drawn == sorted(drawn)

    def _around(self, own: int, state: _Decided) -> tuple[list[fx.Node], list[fx.Node]]:
        """Return the nodes of the window that run in front of the loop, and those that run behind it."""
        first = (own & -own).bit_length() - 1
        before: list[fx.Node] = []
        after: list[fx.Node] = []
        for index, node in enumerate(self._window):
            if own >> index & 1:
                continue
            is_early = state.before >> index & 1 or (index < first and not self._ancestors[node] & own)
            (before if is_early else after).append(node)
        return before, after


def _covers(made: Axes, index: int, axis: Axis) -> bool:
    """Return whether chunks of an output are made that hold those along `axis`."""
    given = made[index] if index < len(made) else None
    return given is not None and given.covers(axis)


def _without_idle(members: Sequence[fx.Node], copies: frozenset[fx.Node]) -> list[fx.Node]:
    used: set[fx.Node] = set()
    kept = []
    for node in reversed(members):
        if node in copies and node not in used:
            continue
        used.update(node.all_input_nodes)
        kept.append(node)
    return kept[::-1]


@remembered
def seeds_of(node: fx.Node) -> list[RegionSeed]:
    """Return the ways to begin a region at `node`."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not value.numel():
        return []
    found = [
        RegionSeed(node=node, axis=_evenly(node, whole(dim, value.shape)), way=("dim", dim))
        for dim, size in enumerate(value.shape)
        if size > 1
    ]
    if node.op == "call_function" and node.target is not operator.getitem:
        found += [
            RegionSeed(node=node, axis=part, way=("part", dim, index))
            for dim in range(value.dim())
            for index, part in _parts(node, dim)
        ]
        found += [
            RegionSeed(node=node, axis=None, ins=ins, way=("sum", index))
            for index, (ins, size) in enumerate(sums(node))
            if size > 1
        ]
        channels, groups = value.shape[1:2], groups_of(node)
        if 1 < groups < sum(channels):
            found.append(RegionSeed(node=node, axis=Axis(1, channels[0] // groups, groups), way=("groups",)))
    return found


def _evenly(node: fx.Node, axis: Axis) -> Axis:
    """Return the axis of rows in steps of those that an operator near by repeats together."""
    near = [node] if axis.dim == ROWS else []
    for each in near:  # grows
        window = window_of(each)
        if window is not None and window.factor > 1 and axis.size % window.factor == 0:
            return axis._replace(inner=window.factor, size=axis.size // window.factor)
        if len(near) < _FAR:
            near += [source for source in each.all_input_nodes if _has_rows(source, axis.size)]
    return axis


def _has_rows(node: fx.Node, rows: int) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dim() > ROWS + 1 and value.shape[ROWS] == rows


def _parts(node: fx.Node, dim: int) -> list[tuple[int, Axis]]:
    """Return the axes of the dimensions that a view in front of `node` has merged into `dim`, by number."""
    axis, passed = whole(dim, shape_of(node)), list[tuple[fx.Node, int]]()
    while axis.span == 1:
        found = None if len(passed) == _FAR or node.op != "call_function" else inputs_for(node, 0, axis)
        slot = found and next((slot for slot, each in enumerate(found[0]) if each is not None), None)
        if found is None or slot is None:
            return []
        passed.append((node, slot))
        node, axis = slots(node)[slot], found[0][slot]  # type: ignore[assignment]
    merged = [(each, whole(each, shape_of(node))) for each in axis.dims if shape_of(node)[each] > 1]
    return [(each, after) for each, part in merged for after in _passed(part, passed)]


def _passed(axis: Axis, passed: Sequence[tuple[fx.Node, int]]) -> list[Axis]:
    """Return an axis behind the nodes in `passed`, the last first, nothing where it does not go through."""
    for node, slot in reversed(passed):
        found = output_for(node, slot, axis)
        if not found:
            return []
        axis = found[0]
    return [axis]
