"""Recomputation for a backward that comes in parts.

Schedules of pipelines split a backward (zero bubble, ZBV): the input part gives the gradients of a stage's
inputs, the weight part gives those of parameters later, in one backward for each group of parameters.
`torch.utils.checkpoint` recomputes a region once for each of these: a Llama block 1 + 9 times.

A node that saves tensors runs in both parts where one of its edges leads to parameters alone. In the input
part the engine does not follow that edge, and says so. So a ticket needs no schedule to know if its node
comes again: it asks the engine when the node asks for the tensor. In a backward of one piece all edges are
followed, and nothing is held that `torch.utils.checkpoint` alone would let go.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.checkpoint import GraphExecGroup

from strategies.regions.saved_tensors import Packed, hooks_around, kept, packed_by, packing


def runs_again() -> bool:
    """Say whether the node of autograd that runs now leaves gradients to a later part of the backward.

    It does where the engine follows an edge of it in another backward, or never.
    """
    node = torch._C._current_autograd_node()  # noqa: SLF001 (no public way)
    if node is not None:
        for each, _ in node.next_functions:
            if each is not None and not _is_followed(each):
                return True
    return False


def holding(run: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """Return `run`, which torch's checkpoint runs in forward and again, and which gives tickets in forward.

    Args:
        run: the function of the region.
        mode: `hold` or `again`.
    """
    is_forward = True

    def call(*args: Any) -> Any:
        nonlocal is_forward
        if not is_forward:
            return run(*args)
        is_forward = False
        checkpoint, passes = hooks_around(), _Passes(holds=mode == "hold")

        def pack(saved: Tensor) -> Packed:
            return passes.ticket(packed_by(checkpoint, saved))

        with packing(pack):
            result = run(*args)
        passes.is_forward = False
        return result

    return call


class _Passes:
    """The recomputations of one call of a region.

    Torch's checkpoint recomputes once for each backward, or for what stands in the place of one: a group.
    Here the parts of a backward share a group, until a ticket is asked for what it has given already.

    Attributes:
        is_forward: forward runs, which may differentiate what it does: of each such part torch has a group.
    """

    def __init__(self, *, holds: bool) -> None:
        self.is_forward = True
        self.group = GraphExecGroup()
        self._holds = holds
        self._is_split = self._is_second = False
        self._tickets: list[weakref.ref[_Ticket]] = []

    def ticket(self, packed: Packed) -> _Ticket:
        """Return what the graph holds in the place of what torch's checkpoint has packed."""
        ticket = _Ticket(self, packed)
        self._tickets.append(weakref.ref(ticket))
        return ticket

    def give(self, ticket: _Ticket) -> Tensor:
        """Return the tensor of a ticket; the region runs now unless it has, or again if it was given."""
        task = torch._C._current_graph_task_id()  # noqa: SLF001 (torch's checkpoint asks so too)
        # torch's checkpoint refuses a node that asks twice in one backward, and so do we
        is_another = ticket.given_in is self.group and ticket.asked_by != task
        ticket.asked_by = task
        if is_another:
            self.group, self._is_second = GraphExecGroup(), True
        value = self._unpack(ticket)
        if is_another and not ticket.is_done:
            self._let_go()
        ticket.is_done = not runs_again()
        self._is_split |= not ticket.is_done
        if self._is_split and (self._is_second or (self._holds and not ticket.is_done)):
            ticket.held = kept(value)  # until autograd releases the node, and the ticket with it
        return value

    def _unpack(self, ticket: _Ticket) -> Tensor:
        around = torch._C._get_graph_exec_group()  # noqa: SLF001 (`GraphExecGroup` refuses to nest)
        torch._C._set_graph_exec_group(self.group)  # noqa: SLF001 (as above)
        try:
            ticket.given_in = self.group
            return ticket.packed()
        finally:
            torch._C._set_graph_exec_group(around)  # noqa: SLF001 (as above)

    def _let_go(self) -> None:
        """Let go of what was made again for nodes that do not run in the weight part."""
        for ticket in filter(None, [each() for each in self._tickets]):
            if ticket.is_done and ticket.given_in is not self.group:
                self._unpack(ticket)


class _Ticket:
    """The object that the graph holds for a saved tensor of a region.

    Attributes:
        packed: what returns the tensor, once in each group.
        given_in: the latest group in which it was asked for.
        asked_by: the latest backward that asked.
        is_done: its node has run for the last time, as far as the engine knows.
        held: what returns the tensor that stays for the weight part.
    """

    __slots__ = ("__weakref__", "_passes", "asked_by", "given_in", "held", "is_done", "packed")

    def __init__(self, passes: _Passes, packed: Packed) -> None:
        self._passes, self.packed = passes, packed
        self.given_in: object = None
        self.asked_by = -1
        self.is_done = False
        self.held: Packed | None = None

    def __call__(self) -> Tensor:
        if self.held is not None:
            return self.held()
        if self._passes.is_forward or torch._C._current_autograd_node() is None:  # noqa: SLF001 (no public way)
            return self.packed()  # the latter: somebody looks at the graph from outside of a backward
        return self._passes.give(self)


def _is_followed(node: Node) -> bool:
    """Say whether the engine runs `node` in this backward, or returns its gradient."""
    try:
        return torch._C._will_engine_execute_node(node)  # noqa: SLF001 (as `register_multi_grad_hook` does)
    except RuntimeError:
        return True  # a leaf whose gradient `torch.autograd.grad` returns: torch refuses to say that it does
