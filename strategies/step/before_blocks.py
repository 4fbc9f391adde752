"""Operators of a model before its first block: which of them belong to the call of that block.

An embedding is no block, and what it makes would be held for the whole step, though it takes no FLOPs to make
it again. So the operators that an input of the first block follows from are part of that block's forward:
what they make is kept or made again, as in a block. Others, such as those of a mask that all
blocks read, are passed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from strategies.estimate.tensors import tensors_in
from strategies.step.needed import needed
from strategies.step.sizes import PriorOperator, TensorSize
from strategies.step.step_graph import OUTSIDE, BlockCall, StepOperator, is_written


@dataclass(kw_only=True, slots=True, eq=False)
class Before:
    """The operators of the caller of the blocks before the first of them.

    Fields:
        caller, sizes: its FQN, and the sizes of its inputs.
        start: moment at which its forward begins.
        operators: numbers of its operators, with their signatures.
        unsafe: those that no tape follows.
        given: storages of the first block's inputs that it has made; none where it was not left in order.
    """

    caller: str
    sizes: tuple[TensorSize, ...]
    start: int
    operators: dict[int, str] = field(default_factory=dict)
    unsafe: set[int] = field(default_factory=set)
    given: frozenset[int] = frozenset()


def joined(
    before: Before, call: BlockCall, operators: Sequence[StepOperator], asked: AbstractSet[int]
) -> AbstractSet[int]:
    """Return the numbers of the operators that belong to the first block's call.

    They are those that its inputs follow from, of inputs that no other block reads. None are, where a tape
    cannot follow one of them, or where others write to what they read or make.

    Args:
        asked: storages of which backward asks for something in that call.
    """
    readers: dict[int, set[int]] = {}
    for operator in operators:
        for storage in operator.reads:
            readers.setdefault(storage, set()).add(operator.call)
    wanted = {storage for storage in before.given & asked if readers.get(storage, set()) <= {OUTSIDE, 0}}
    found = _made_before(before, operators, wanted)
    if found & before.unsafe or is_written(operators, found, call.end, set(call.operators)):
        return frozenset()
    return found


def join(
    before: Before, call: BlockCall, operators: Sequence[StepOperator], found: AbstractSet[int]
) -> Mapping[int, int]:
    """Let operators belong to the first call, and return what they make, with the number of that call.

    Args:
        before, call, operators: as of `joined`.
    """
    call.caller, call.caller_sizes, call.start = before.caller, before.sizes, before.start
    call.before = tuple(_prior(before, found))
    for index in call.operators:
        operators[index].ordinal += len(call.before)
    for ordinal, index in enumerate(sorted(found)):
        operators[index].call, operators[index].ordinal = 0, ordinal
    call.operators = [*sorted(found), *call.operators]
    made = dict.fromkeys((storage for index in found for storage in operators[index].makes), 0)
    call.inputs = {storage: number for storage, number in call.inputs.items() if storage not in made}
    return made


def signature_of(name: str, operands: Any) -> str:
    """Return what an operator before the blocks is known by: its name, and kinds of the tensors that it gets.

    Sizes are not in it: ranks may have shards of several sizes.
    """
    kinds = (f"{str(each.dtype).removeprefix('torch.')}[{each.dim()}]" for each in tensors_in(operands))
    return f"{name}({', '.join(kinds)})"


def _prior(before: Before, found: AbstractSet[int]) -> Iterator[PriorOperator]:
    """Yield the operators that belong to the first call, each with those like it that are to be skipped."""
    skipped: Counter[str] = Counter()
    for index, signature in before.operators.items():
        if index in found:
            yield PriorOperator(signature, skipped[signature])
            skipped.clear()
        else:
            skipped[signature] += 1


def _made_before(before: Before, operators: Sequence[StepOperator], wanted: Iterable[int]) -> set[int]:
    """Return the operators that storages follow from, among those before the blocks."""
    makers = {storage: index for index in before.operators for storage in operators[index].makes}
    writers: dict[int, list[int]] = {}
    for index in before.operators:
        for storage in operators[index].writes:
            writers.setdefault(storage, []).append(index)

    def made(storages: Iterable[int]) -> list[int]:
        known = [storage for storage in storages if storage in makers]
        return [index for each in known for index in (makers[each], *writers.get(each, ()))]

    return needed(made(wanted), lambda index: made(operators[index].reads))
