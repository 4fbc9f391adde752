"""The place of execution in a training step, as far as autograd alone tells."""

from __future__ import annotations

from typing import Literal

import torch
from torch.autograd.graph import Node

from strategies.estimate.recomputing import is_marked

Phase = Literal["forward", "backward", "optimizer"]

# autograd runs an AccumulateGrad node as soon as it is ready: its sequence number is the largest there is
FIRST_UNORDERED_NODE = 2**63


class Position:
    """The position of the executing operator; a `Locator` also knows phases and modules.

    Attributes:
        phase: what the step is doing, set as the step goes on.
    """

    def __init__(self) -> None:
        self.phase: Phase = "forward"

    @property
    def module(self) -> str:
        """FQN of the module that executes; empty where it is not followed."""
        return ""

    @property
    def place(self) -> str:
        """The same, for who asks in between: asking does not change what is told later."""
        return ""

    @property
    def source(self) -> str:
        """`file:line` of the model's code that executes, or whose backward does; empty where not followed."""
        return ""

    @property
    def is_recomputing(self) -> bool:
        """True if the executing operator is a forward operator of a backward pass.

        A backward pass runs without recording; recomputation records, or says what it is.
        """
        return running_node() is not None and (torch.is_grad_enabled() or is_marked())

    @property
    def is_accumulating(self) -> bool:
        """True if autograd is adding to, or setting, the `.grad` of a leaf."""
        node = running_node()
        return node is not None and sequence_number(node) >= FIRST_UNORDERED_NODE

    @property
    def node(self) -> str:
        """Name of the autograd node that executes; empty outside a backward pass."""
        node = running_node()
        return "" if node is None else str(node.name())


def running_node() -> Node | None:
    """Return the autograd node that a backward pass executes now, if any."""
    node: Node | None = torch._C._current_autograd_node()  # noqa: SLF001 (no public way to ask)
    return node


def sequence_number(node: Node) -> int:
    """Return the place of a node in the order of forward."""
    return int(node._sequence_nr())  # type: ignore[no-untyped-call]  # noqa: SLF001 (the order of forward has no public name)
