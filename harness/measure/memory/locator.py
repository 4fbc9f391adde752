"""The place of execution in a training step: the phase, the module, and whether it is recomputation.

Nothing here touches autograd: modules are followed by wrapping the `forward` functions of their classes, and
a backward operator is led back to its module by the sequence number that autograd gives every node of the
forward pass. So the operators of the step are those of a step that nobody watches.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import FunctionType
from typing import Any, Self

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness.measure.memory.source_lines import source_line
from strategies.estimate.patched import Wrappings, wrapped
from strategies.estimate.recomputing import is_marked
from strategies.step.position import FIRST_UNORDERED_NODE, Position, running_node, sequence_number

MODEL = "(model)"
LOSS = "(loss)"
OPTIMIZER = "(optimizer)"

ASKERS = ("forward", "input", "weight")
"""Parts of a step that run forwards of blocks."""

_WRAPPER_PARTS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


class Locator(Position, AbstractContextManager["Locator"]):
    """Follows one model through one step; enter it around the step and set `phase` as the step goes on.

    Attributes:
        asked_by: part of the step that asks for forwards now: `forward`, a backward (or its part for the
            `input`), or the part of a backward for the `weight`.
        calls_by_asker: forward calls of each block by that part.

    A reentrant region on CUDA records its graph on the thread of the backward pass, whose sequence numbers
    start again: `module` may then name another module of the model.
    """

    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.asked_by = ASKERS[0]
        self.calls_by_asker = {name: dict.fromkeys(ASKERS, 0) for name in blocks}
        self._model = model
        self._names = {id(module): _readable(name, model) for name, module in model.named_modules()}
        self._blocks = {id(module): name for name, module in blocks.items()}
        self._inside: list[int] = []
        self._starts: list[int] = [0]
        self._owners: list[str] = [LOSS]
        self._lines: list[str] = []
        self._line_starts: list[int] = []
        self._latest = LOSS
        self.wrappings = Wrappings()
        self._thread = threading.get_ident()

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        self._lines, self._line_starts = [""], [0, _next_sequence_number()]
        classes = {
            owner
            for module in self._model.modules()
            for owner in type(module).__mro__
            if owner is not nn.Module
        }
        for owner in {owner for owner in classes if isinstance(vars(owner).get("forward"), FunctionType)}:
            self.wrappings.enter(partial(_following, owner, self._follow))
        for module in self._model.modules():
            # as `block.forward = partial(checkpoint, block.forward)` sets it, which holds the plain forward
            if id(module) in self._blocks and "forward" in vars(module):
                self.wrappings.wrap(module, "forward", partial(self._follow_own, module))
        return self

    def __exit__(self, *_: object) -> None:
        self.wrappings.close()

    @property
    def calls(self) -> dict[str, int]:
        """Forward calls of each block, recomputation included."""
        return {name: sum(counts.values()) for name, counts in self.calls_by_asker.items()}

    @property
    def module(self) -> str:
        """FQN of the module that executes, or to which the executing backward node belongs."""
        if self.phase == "optimizer":
            return OPTIMIZER
        self._latest = self.place
        return self._latest

    @property
    def place(self) -> str:
        """The same, without being remembered for the nodes that no module owns."""
        if self.phase == "optimizer":
            return OPTIMIZER
        if self._inside:
            return self._names[self._inside[-1]]
        return LOSS if self.phase == "forward" else self._owner_of_node() or self._latest

    @property
    def source(self) -> str:
        """`file:line` of the model's code that executes; in backward, where the node was made.

        Asked at every operator, so that each node has the line that made it.
        """
        if self.phase == "optimizer":
            return ""
        line = source_line()
        following = _next_sequence_number()
        if threading.get_ident() == self._thread and following > self._line_starts[-1]:
            # nodes since the operator before are those of this one, and of views that came just before it
            self._lines.append(line)
            self._line_starts.append(following)
        return line or self._line_of_node()

    @property
    def is_recomputing(self) -> bool:
        """True if the executing operator is a forward operator of a backward pass.

        A backward pass runs without recording, and recomputation records, or says what it is. Only a
        reentrant region inside another one recomputes without either, inside the `forward` of a module.
        """
        if self.phase != "backward" or running_node() is None:
            return False
        return torch.is_grad_enabled() or bool(self._inside) or is_marked()

    def _follow(self, original: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        # the class of a checkpointed block calls the `forward` of the plain class: one call, not two
        if id(module) not in self._names or id(module) in self._inside:
            return original(module, *args, **kwargs)
        with self._entered(module):
            return original(module, *args, **kwargs)

    def _follow_own(
        self, module: nn.Module, original: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        return self._follow(lambda _module, *a, **k: original(*a, **k), module, *args, **kwargs)

    @contextmanager
    def _entered(self, module: nn.Module) -> Iterator[None]:
        """Count the call of a block, and have the module executing inside the scope."""
        if id(module) in self._blocks:
            self.calls_by_asker[self._blocks[id(module)]][self.asked_by] += 1
        self._inside.append(id(module))
        self._mark()
        try:
            yield
        finally:
            self._inside.pop()
            self._mark()

    def _mark(self) -> None:
        """Note to whom the autograd nodes belong that are made from now on."""
        if threading.get_ident() != self._thread:
            return  # sequence numbers count per thread
        self._starts.append(_next_sequence_number())
        self._owners.append(self._names[self._inside[-1]] if self._inside else LOSS)

    def _owner_of_node(self) -> str | None:
        node = running_node()
        if node is None or sequence_number(node) >= FIRST_UNORDERED_NODE:
            return None
        return self._owners[bisect_right(self._starts, sequence_number(node)) - 1]

    def _line_of_node(self) -> str:
        """Return the line that made the running backward node; empty of one that no operator has made."""
        node = running_node()
        if node is None or sequence_number(node) >= self._line_starts[-1]:
            return ""
        return self._lines[bisect_right(self._line_starts, sequence_number(node)) - 1]


def _next_sequence_number() -> int:
    return int(torch._C._autograd._get_sequence_nr())  # noqa: SLF001 (the order of forward has no public name)


@contextmanager
def _following(owner: type, around: Callable[..., Any]) -> Iterator[None]:
    """Let `around` run the `forward` of a class within the scope.

    A forward that refers to itself, as that of a layer of `transformers` does to see whether a subclass has
    wrapped it, stays the function that it is: what runs is the one that it wraps. With another function in
    its place such a layer would not checkpoint.
    """
    forward: Any = vars(owner)["forward"]
    cells = dict(zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True))
    inner = getattr(forward, "__wrapped__", None)
    cell = next((each for each in cells.values() if inner is not None and _holds(each, inner)), None)
    if cell is None or forward.__code__.co_name not in cells:
        with wrapped(owner, "forward", around):
            yield
        return
    cell.cell_contents = partial(around, inner)
    try:
        yield
    finally:
        cell.cell_contents = inner


def _holds(cell: Any, value: Any) -> bool:
    """Say whether a cell of a closure holds `value`; it may be empty."""
    try:
        return cell.cell_contents is value
    except ValueError:
        return False


def _readable(name: str, model: nn.Module) -> str:
    parts = [part for part in name.split(".") if part and part not in _WRAPPER_PARTS]
    if isinstance(model, DistributedDataParallel) and parts[:1] == ["module"]:
        parts = parts[1:]
    return ".".join(parts) or MODEL
