"""Reuse an input buffer for a loop's output when the loop is the buffer's last user."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import fx

from strategies.chunk.loops.loop import Loop, LoopInput, LoopOutput
from strategies.chunk.loops.schedule import Schedule
from strategies.estimate.liveness import Key
from strategies.estimate.operator_cost import bytes_of


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferReuse:
    """The buffers that loops of one graph may overwrite.

    Fields:
        outside: storages of graph inputs, parameters and buffers, which code outside of the graph may read.
        is_possible: false where autograd may have saved the buffers.
    """

    outside: frozenset[Key]
    is_possible: bool

    @classmethod
    def of(cls, schedule: Schedule, donated: frozenset[fx.Node]) -> BufferReuse:
        """Return the buffers of a schedule's graph; inputs in `donated` may be overwritten."""
        storages = schedule.storages
        standing = storages.standing.items()
        outside = frozenset(key for node, keys in standing if node not in donated for key in keys)
        return cls(outside=outside, is_possible=not storages.has_gradients)

    def chosen(self, schedule: Schedule, at: int) -> Loop:
        """Return the loop at a position, with as many outputs as possible in buffers of its inputs."""
        return self._reusing(schedule, at, lambda _, __: True)

    def checked(self, schedule: Schedule, at: int) -> Loop:
        """Return the loop at a position without the reuse that this graph does not allow."""
        return self._reusing(schedule, at, lambda result, operand: operand.node is result.into)

    def _reusing(
        self, schedule: Schedule, at: int, may_reuse: Callable[[LoopOutput, LoopInput], bool]
    ) -> Loop:
        """Return the loop at position `at`, with its results on memory of inputs that die in it."""
        loop = schedule.items[at]
        assert isinstance(loop, Loop)
        plain = replace(loop, outputs=tuple(replace(result, into=None) for result in loop.outputs))
        trial = replace(schedule, items=[*schedule.items[:at], plain, *schedule.items[at + 1 :]])
        dying = trial.last_used(at) - self.outside if self.is_possible else set()
        outputs: list[LoopOutput] = []
        for result in loop.outputs:
            used = {each.into for each in outputs}
            inputs = (each for each in loop.inputs if each.node not in used and may_reuse(result, each))
            into = (each.node for each in inputs if self._fits(plain, result, each, dying, trial))
            outputs.append(replace(result, into=next(into, None)))
        return replace(plain, outputs=tuple(outputs))

    def _fits(
        self, loop: Loop, result: LoopOutput, operand: LoopInput, dying: set[Key], schedule: Schedule
    ) -> bool:
        """Return whether a result can lie on the memory of an input.

        Both must have one layout and one cut, and nobody may read the input later.
        """
        node, axis = operand.node, operand.axis
        keys = schedule.keys_of(node)
        if axis is None or axis != result.axis or len(keys) != 1 or not keys <= dying:
            return False
        if (
            not _is_alike(node, result.node)
            or sum(bool(keys & schedule.keys_of(each.node)) for each in loop.inputs) != 1
        ):
            return False
        return _is_written_last(loop, result, node, schedule)


def _is_alike(node: fx.Node, result: fx.Node) -> bool:
    """Return whether a result has the layout of a value, which fills its memory."""
    old, new = node.meta["val"], result.meta["val"]
    if (old.shape, old.stride(), old.dtype) != (new.shape, new.stride(), new.dtype):
        return False
    return bool(new.is_contiguous() and old.untyped_storage().nbytes() == bytes_of(old))


def _is_written_last(loop: Loop, result: LoopOutput, node: fx.Node, schedule: Schedule) -> bool:
    """Return whether the body writes the result when it has used up its chunk of the value."""
    position = {member: index for index, member in enumerate(loop.region.members)}
    on = set(schedule.storages.keys[node])
    looking = [
        member
        for member in loop.region.members
        if node in member.all_input_nodes or on & set(schedule.storages.keys[member])
    ]
    users = [user for member in looking if on & set(schedule.storages.keys[member]) for user in member.users]
    return all(position.get(each, -1) <= position[result.node] for each in (*looking, *users))
