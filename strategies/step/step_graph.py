"""A training step at the level of storages: which operators ran, what they read and made, what lived when.

*Moments* count the births, resizings and deaths of storages: moment t is what lives after t of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from strategies.step.sizes import PriorOperator, TensorSize
from strategies.step.step_recorder import RecordedOperator

OUTSIDE = -1
"""The call of an operator that no block runs."""


@dataclass(kw_only=True, slots=True)
class StepOperator(RecordedOperator):
    """One operator of a step, and what a plan must know of it.

    Fields:
        call: number of the block call whose forward runs it; `OUTSIDE` of all others.
        ordinal: its number among the operators of that forward.
        seconds: its work on the machine that stands for the device.
        private_bytes: bytes that it makes and frees on top of results.
        random_states: generators whose state decides its result.
        is_repeatable: whether a plan may run it again.
        forgoes: whether it runs again without what it writes to, which the step has not made.
        others: storages that it makes besides results: tensors of Python numbers, which autograd may save.
    """

    call: int
    ordinal: int
    is_forward: bool
    seconds: float
    private_bytes: int
    random_states: int
    is_repeatable: bool
    forgoes: bool = False
    others: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Redemption:
    """A value that a node of autograd has asked for.

    Fields:
        until: the last moment at which the node holds it.
        node_until: the same, if the node gets it when it asks; later than `until` where it reads it late.
        released: the last moment at which the graph holds what autograd has saved; later than `until` where a
            gradient is summed to the shape of its input.
    """

    storage: int
    moment: int
    until: int
    node_until: int
    released: int
    node: str

    @property
    def held_until(self) -> int:
        """The last moment at which node or graph hold the value, if autograd saves it itself."""
        return max(self.until, self.released)


@dataclass(kw_only=True, slots=True)
class Checkpointed:
    """The facts of a call that a checkpoint around its forward follows from.

    Fields:
        given: storages of its inputs.
        operators: how many of the block's operators have run when autograd saves for the last time.
        asked: first moment at which backward asks for anything that was saved, weights included.
        released: last moment at which the graph holds anything of it.
        waiting: how many saved tensors the graph holds after the step.
        is_possible: whether Python code may run again: no hooks inside of the block, nor units of FSDP, nor
            chunks, nor autocast; and what its modules hold is in backward what forward found.
    """

    given: frozenset[int] = frozenset()
    operators: int = 0
    asked: int | None = None
    released: int = -1
    waiting: int = 0
    is_possible: bool = False


@dataclass(kw_only=True, slots=True)
class BlockCall:
    """One call of a block.

    Fields:
        fqn: plain FQN of the block.
        start, end: moments between which its forward runs.
        operators: numbers of its operators in the step.
        redemptions: what autograd has saved of the storages that they make, and of `inputs`, in the order of
            backward.
        shared: the same of storages that autograd holds as ever, because other calls have made them or ask
            for them, too.
        sizes: sizes of its inputs and of the block's parameters.
        inputs: storages of inputs that a plan may move, each with the number of the input: those that an
            operator of the step has made, and of which no other call asks for anything.
        unasked: storages that the graph holds after forward, and that backward does not ask for.
        dropped: the last moment at which the graph holds each storage that it saves for nodes which are gone
            when forward ends, because nobody goes on with what they gave.
        stays_because: why no plan decides about it, as the end of a sentence; empty where plans do.
        modules: plain FQNs of the modules next to the blocks whose forwards, one after another, are this one;
            empty of a block.
        caller: FQN of the module that calls the block, of whose operators before it some belong to this call;
            `None` where none do.
        caller_sizes: sizes of the inputs of that module.
        before: those operators, the first ones of the call.
        checkpointed: what a checkpoint around it would do.
    """

    fqn: str
    start: int
    end: int = 0
    operators: list[int] = field(default_factory=list)
    redemptions: list[Redemption] = field(default_factory=list)
    shared: list[Redemption] = field(default_factory=list)
    sizes: tuple[TensorSize, ...] = ()
    inputs: dict[int, int] = field(default_factory=dict)
    unasked: set[int] = field(default_factory=set)
    dropped: dict[int, int] = field(default_factory=dict)
    stays_because: str = ""
    modules: list[str] = field(default_factory=list)
    caller: str | None = None
    caller_sizes: tuple[TensorSize, ...] = ()
    before: tuple[PriorOperator, ...] = ()
    checkpointed: Checkpointed = field(default_factory=Checkpointed)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepGraph:
    """One training step as it was captured.

    What autograd saves of a block's own storages and inputs is not held: they live as forward has them.

    Fields:
        operators: all operators, in order of time.
        calls: the calls of blocks, in order of time.
        nbytes: bytes of each storage, by number; 0 of one on the host.
        deaths: the last moment at which each storage lives, by number.
        held_bytes: bytes that live at each moment, shape (moments + 1,).
        unshared: the last moments of storages that calls share, if no call asked for what others have made.
        gathered: storages that are emptied and filled again, as FSDP does with parameters.
        gradients: storages of gradients that outlive the step.
        fixed_bytes: bytes there before the step, and never freed in it.
        device: type of the device that computes.
        stages: numbers of the stages of a pipeline that the rank has, whose blocks are called once for each
            micro-batch, as a schedule orders them; none of a whole model.
    """

    operators: Sequence[StepOperator]
    calls: Sequence[BlockCall]
    nbytes: Mapping[int, int]
    deaths: Mapping[int, int]
    held_bytes: npt.NDArray[np.int64]
    unshared: Mapping[int, int] = field(default_factory=dict)
    gathered: frozenset[int] = frozenset()
    gradients: frozenset[int]
    fixed_bytes: int
    device: str
    stages: tuple[int, ...] = ()

    @property
    def flops(self) -> int:
        """FLOPs of the step."""
        return sum(operator.flops for operator in self.operators)

    @property
    def seconds(self) -> float:
        """Seconds of the operators, by the machine's numbers."""
        return sum(operator.seconds for operator in self.operators)

    def fingerprint(self, call: BlockCall) -> str:
        """Return the number of operators of a call and a digest of names, order and bytes."""
        numbers: dict[int, int] = {}
        digest = hashlib.sha256()
        for operator in (self.operators[index] for index in call.operators):
            for storage in (*sorted(operator.reads), *operator.makes):
                numbers.setdefault(storage, len(numbers))
            known = (
                operator.name,
                sorted(numbers[storage] for storage in operator.reads),
                [(numbers[storage], self.nbytes[storage]) for storage in operator.makes],
            )
            digest.update(repr(known).encode())
        return f"{len(call.operators)} operators, {digest.hexdigest()[:16]}"


def is_written(
    operators: Sequence[StepOperator],
    own: AbstractSet[int],
    end: int,
    besides: AbstractSet[int] = frozenset(),
) -> bool:
    """Say whether others write to what some operators have read or made.

    Args:
        operators: all of the step.
        own: numbers of those operators.
        end: moment at which their forward ends.
        besides: numbers of operators that may write.
    """
    known = set[int]()
    for number in range(min(own, default=len(operators)), len(operators)):
        operator = operators[number]
        if operator.start >= end:
            break
        if number in own:
            known |= operator.reads | operator.makes.keys()
        elif number not in besides and not known.isdisjoint(operator.writes):
            return True
    return False
