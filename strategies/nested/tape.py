"""Tapes: what one forward did inside a region, as calls of modules and of the functions between them.

Tensors made inside stand on it as slots; of the tensors from outside the region keeps those that its calls
read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from strategies.generators import State, put
from strategies.nested.nest_options import Regions
from strategies.nested.nested_regions import Path
from strategies.nested.structures import put_together, tensors_of
from strategies.nested.surroundings import Modes
from strategies.nested.tickets import Ticket
from strategies.regions.outside_tensors import FoundTensors
from strategies.regions.own_parameters import identities_of, of_other_parameters, weights_of
from strategies.regions.rewind import RewoundCall


class Slot:
    """Stands for a tensor on a tape.

    Attributes:
        position: how many calls the tape had when it was made; -1 outside of the region.
        is_changed: a call on the tape changes it in place.
    """

    __slots__ = ("is_changed", "position")

    def __init__(self, position: int) -> None:
        self.position = position
        self.is_changed = False


class Following(Protocol):
    """Follows a module's forward when it runs again, and holds the tapes of the regions that begin in it."""

    def repeating(self) -> AbstractContextManager[None]:
        """Follow what runs inside of the block."""

    def saved(self, ticket: weakref.ref[Ticket]) -> None:
        """Take note that autograd saves a tensor."""


@dataclass(kw_only=True, slots=True, eq=False)
class Call:
    """A call of a function or module on a tape.

    Fields:
        name: FQN of the module, or the name of the function.
        leaves: leaves of the arguments; tensors are slots.
        modes: modes of torch around it.
        rewound: the state that a module finds.
        generators: states of random number generators, where somebody has set them since the call before.
        follow: what follows the forward of a module that holds labels, when the call runs again.
        regions: the recomputed regions around it.
        tickets: for each tensor that autograd saved in it, as long as autograd keeps them.
        module: module whose parameters stay what they are; `None` for a function, or under FSDP.
        found: the tensors outside of it that a module finds; `None` for a function, or under FSDP.
        differentiates: a backward runs inside of it.
        changes_outside: it changes in place what was made outside of the region.
    """

    name: str
    run: Callable[..., Any]
    leaves: list[Any]
    structure: Any
    modes: Modes
    is_module: bool = False
    rewound: RewoundCall | None = None
    generators: list[State] = field(default_factory=list)
    follow: Callable[[Any, Call], Following] | None = None
    label: Path = ()
    regions: Regions = ()
    made: list[Slot] = field(default_factory=list)
    tickets: list[weakref.ref[Ticket]] = field(default_factory=list)
    module: nn.Module | None = None
    weights: tuple[int, ...] = ()
    found: FoundTensors | None = None
    differentiates: bool = False
    changes_outside: bool = False

    def read(self) -> Iterator[Slot]:
        """Yield the slots that it reads."""
        return (leaf for leaf in self.leaves if type(leaf) is Slot)


def read_from_outside(calls: Iterable[Call]) -> set[Slot]:
    """Return the slots that `calls` read and do not make."""
    made: set[Slot] = set()
    read: set[Slot] = set()
    for call in calls:
        read.update(slot for slot in call.read() if slot not in made)
        made.update(call.made)
    return read


def run(call: Call, values: dict[Slot, Tensor]) -> None:
    """Run `call` on the `values` that its slots have, and put there what it makes.

    Raises:
        CheckpointError: it returns another number of tensors.
    """
    leaves = [values[leaf] if type(leaf) is Slot else leaf for leaf in call.leaves]
    args, kwargs = put_together(call.structure, leaves)
    if call.module is not None and call.weights != identities_of(weights_of(call.module)):
        raise of_other_parameters(repr(call.name))
    put(call.generators)
    with call.modes.entered():
        if call.rewound is None:
            results = tensors_of(call.run(*args, **kwargs))
        else:
            with call.rewound.recomputation():
                results = tensors_of(call.rewound.again(call.run, *args, **kwargs))
    if len(results) != len(call.made):
        problem = f"returned {len(results)} tensors in its recomputation, and {len(call.made)} in forward"
        raise CheckpointError(f"ac: {call.name!r} {problem}")
    values.update(zip(call.made, results, strict=True))
