"""Soundness of a choice: whether the model's code does on every rank's parts what it does on the whole.

The forward is recorded as a rank would run it. It must make the same calls in the same order, on the same
tensors, with the same numbers, and every result must be the part that its state says. Then the rules, which
describe single functions, hold for the whole forward, whatever sizes its code reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from torch import fx

from strategies.shard.candidates.layout import Shape, local_shape
from strategies.shard.model.call_states import function_name, rule_of
from strategies.shard.model.forward_recording import Followed, Forward, Parts, RecordedStep
from strategies.shard.model.placement_state import WHOLE, State


@dataclass(frozen=True, kw_only=True, slots=True)
class Conflict:
    """A difference between the forward on parts and on the whole.

    Fields:
        suspects: nodes whose state may be to blame, the most likely first; all are in another than whole.
    """

    problem: str
    suspects: tuple[fx.Node, ...]


def first_conflict(
    forward: Forward, whole: Followed, leaves: AbstractSet[str], ranks: int, states: Mapping[fx.Node, State]
) -> Conflict | None:
    """Return the first difference; `None` if a rank does on its parts what the forward does on the whole.

    Args:
        forward: the forward, to record once more.
        whole: steps of the forward on whole tensors.
        leaves: FQNs of the modules that may give another state than they take.
        ranks: number of ranks on the mesh axis.
        states: states of what its nodes give, if anybody uses that.
    """
    parts: Parts = {
        str(step.node.target): (_part(step.shapes[0], states[step.node], ranks), step.node.meta["val"])
        for step in whole.steps
        if step.node.op == "call_module" and step.node.target in leaves
    }
    return _Comparison(whole, forward.on_parts(parts), states, ranks).first()


class _Comparison:
    def __init__(self, whole: Followed, part: Followed, states: Mapping[fx.Node, State], ranks: int) -> None:
        self._whole = whole
        self._part = part
        self._states = states
        self._ranks = ranks

    def first(self) -> Conflict | None:
        """Return the first difference of steps, and then of what is returned and kept."""
        for number, (whole, part) in enumerate(zip_longest(self._whole.steps, self._part.steps)):
            if whole is None or part is None:
                return self._ended(number, whole)
            conflict = self._between(number, whole, part)
            if conflict is not None:
                return conflict
        if self._part.stop is not None:
            return self._ended(len(self._whole.steps), None)
        returned = (self._whole.outputs, self._whole.structure), (self._part.outputs, self._part.structure)
        for expected, actual in _differences(*returned):
            return self._read(len(self._whole.steps), f"it returns {actual} for {expected}", expected, actual)
        return self._kept()

    def _between(self, number: int, whole: RecordedStep, part: RecordedStep) -> Conflict | None:
        """Return where a step on parts does otherwise than on the whole, `None` where it does the same."""
        here = described(whole)
        if (whole.node.op, whole.node.target) != (part.node.op, part.node.target):
            return self._read(number, f"{described(part)} is called, on the whole {here}")
        rule = rule_of(whole.node)
        follows_shapes = rule is not None and rule.follows_shapes
        for expected, actual in _differences(whole.arguments, part.arguments):
            if not (follows_shapes and type(expected) is type(actual) is int):
                problem = f"{here} is called with {actual}, on the whole with {expected}"
                return self._read(number, problem, expected, actual)
        state = self._states.get(whole.node)  # none of a part of a tuple that nobody uses
        expected_shapes = tuple(_part(shape, state or WHOLE, self._ranks) for shape in whole.shapes)
        if state is None or expected_shapes == part.shapes:
            return None
        given, wanted = (" and ".join(map(str, shapes)) for shapes in (part.shapes, expected_shapes))
        text = f"{here} gives {given}, where the part is {wanted}"
        return self._here(number, whole, text)

    def _ended(self, number: int, whole: RecordedStep | None) -> Conflict:
        """Return what it is that the forward ends too early, or goes on."""
        if self._part.stop is None:
            return self._read(number, "it makes more or fewer calls than on the whole")
        if whole is None or not self._part.stopped_in_call:
            return self._read(number, f"it stops: {self._part.stop}")
        return self._here(number, whole, f"{described(whole)} fails: {self._part.stop}")

    def _kept(self) -> Conflict | None:
        """Return a result that somebody keeps and that would be a shard, `None` where there is none."""
        for number in self._part.kept:
            node = self._whole.steps[number].node
            if self._states.get(node, WHOLE) != WHOLE:
                what = described(self._whole.steps[number])
                return Conflict(problem=f"somebody else keeps what {what} gives", suspects=(node,))
        return None

    def _here(self, number: int, whole: RecordedStep, problem: str) -> Conflict:
        """Blame the step itself, and then what was read before it."""
        found = self._read(number, problem)
        own = (whole.node,) if self._states.get(whole.node, WHOLE) != WHOLE else ()
        return Conflict(problem=problem, suspects=(*own, *found.suspects))

    def _read(self, number: int, problem: str, *sizes: Any) -> Conflict:
        """Blame the tensors of which something was read before a step, the one of these sizes first."""
        asked = [self._whole.steps[read.step] for read in reversed(self._part.reads) if read.before <= number]
        steps = {step.node: step for step in asked if self._states.get(step.node, WHOLE) != WHOLE}
        likely = [node for node, step in steps.items() if sizes and sizes in self._sizes(step)]
        return Conflict(problem=problem, suspects=tuple(dict.fromkeys((*likely, *steps))))

    def _sizes(self, step: RecordedStep) -> Iterator[tuple[int, int]]:
        for shape in step.shapes:
            yield from zip(shape, _part(shape, self._states[step.node], self._ranks), strict=True)


def described(step: RecordedStep) -> str:
    """Return what is called and where, `'relu' at model.py:12`."""
    name = function_name(step.node) or str(step.node.target)
    return f"{name!r} at {step.line}" if step.line else repr(name)


def _part(shape: Shape, state: State, ranks: int) -> Shape:
    return local_shape(shape, (state.value,), (ranks,))


def _differences(whole: Any, part: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what differs between arguments, constants and recorded tensors."""
    entries = _entries(whole, part)
    if entries is not None:
        for one, other in entries:
            yield from _differences(one, other)
    elif not (type(whole) is type(part) and (whole == part or whole != whole)):  # noqa: PLR0124 (NaN)
        yield whole, part


def _entries(whole: Any, part: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the entries of two containers of one form, in pairs; `None` if they are no such containers."""
    if isinstance(whole, slice) and isinstance(part, slice):
        return zip((whole.start, whole.stop, whole.step), (part.start, part.stop, part.step), strict=True)
    if isinstance(whole, dict) and isinstance(part, dict) and whole.keys() == part.keys():
        return [(value, part[key]) for key, value in whole.items()]
    if isinstance(whole, list | tuple) and isinstance(part, list | tuple) and len(whole) == len(part):
        return zip(whole, part, strict=True)
    return None
