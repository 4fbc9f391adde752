"""Reuse an input buffer for a loop's output when the loop is the buffer's last user."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from strategies.chunk.loops.loop import Loop, LoopInput, LoopOutput
from strategies.chunk.loops.schedule import Schedule
from strategies.estimate.liveness import Key
from strategies.estimate.operator_cost import bytes_of


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferReuse:
    """Which buffers loops of one graph may overwrite.

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
        plain, trial = _without(schedule, at)
        dying = self._dying(trial, at)
        outputs: list[LoopOutput] = []
        for result in plain.outputs:
            used = {each.into for each in outputs}
            inputs = (operand for operand in plain.inputs if operand.node not in used)
            into = (operand.node for operand in inputs if self._fits(plain, result, operand, dying, trial))
            outputs.append(replace(result, into=next(into, None)))
        return replace(plain, outputs=tuple(outputs))

    def checked(self, schedule: Schedule, at: int) -> Loop:
        """Return the loop at a position without the reuse that this graph does not allow."""
        plain, trial = _without(schedule, at)
        dying = self._dying(trial, at)
        loop = schedule.items[at]
        assert isinstance(loop, Loop)

        def is_right(result: LoopOutput) -> bool:
            inputs = (operand for operand in plain.inputs if operand.node is result.into)
            return any(self._fits(plain, result, operand, dying, trial) for operand in inputs)

        outputs = (result if is_right(result) else replace(result, into=None) for result in loop.outputs)
        return replace(plain, outputs=tuple(outputs))

    def _dying(self, schedule: Schedule, at: int) -> set[Key]:
        return schedule.last_used(at) - self.outside if self.is_possible else set()

    def _fits(
        self, loop: Loop, result: LoopOutput, operand: LoopInput, dying: set[Key], schedule: Schedule
    ) -> bool:
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


def _without(schedule: Schedule, at: int) -> tuple[Loop, Schedule]:
    """Return the loop at a position with all results in memory of their own, and the schedule with it."""
    loop = schedule.items[at]
    assert isinstance(loop, Loop)
    plain = replace(loop, outputs=tuple(replace(result, into=None) for result in loop.outputs))
    return plain, replace(schedule, items=[*schedule.items[:at], plain, *schedule.items[at + 1 :]])


def _is_alike(node: fx.Node, result: fx.Node) -> bool:
    """Whether a result has the layout of a value, which fills its memory."""
    old, new = node.meta["val"], result.meta["val"]
    if (old.shape, old.stride(), old.dtype) != (new.shape, new.stride(), new.dtype):
        return False
    return bool(new.is_contiguous() and old.untyped_storage().nbytes() == bytes_of(old))


def _is_written_last(loop: Loop, result: LoopOutput, node: fx.Node, schedule: Schedule) -> bool:
    """Whether the body writes the result when it has used up its chunk of the value."""
    position = {member: index for index, member in enumerate(loop.region.members)}
    on = set(schedule.storages.keys[node])
    looking = [
        member
        for member in loop.region.members
        if node in member.all_input_nodes or on & set(schedule.storages.keys[member])
    ]
    users = [user for member in looking if on & set(schedule.storages.keys[member]) for user in member.users]
    return all(position.get(each, -1) <= position[result.node] for each in (*looking, *users))
