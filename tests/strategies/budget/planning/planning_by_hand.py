"""Plans without a planner: what the operators of a forward make, and blocks that keep a share of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from strategies.budget.eager.planned_block import PlannedBlock, PlannedModule
from strategies.budget.plan import BlockPlan, Value
from strategies.estimate.tensors import tensors_in
from strategies.regions import region
from strategies.regions.host_copies import HostLedger
from strategies.step.memory_layout import dense_of
from strategies.step.operator_facts import is_numbered


class Made(TorchDispatchMode):
    """Lists the storages that the operators of a forward make."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Value] = []
        self.operators = 0
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in((args, kwargs)):
            self._note(tensor)
        result = func(*args, **(kwargs or {}))
        for number, tensor in enumerate(tensors_in(result)):
            if self._note(tensor):
                self.values.append(Value(self.operators, number, str(func)))
        self.operators += is_numbered(func, None)
        return result

    def _note(self, tensor: Any) -> bool:
        dense = dense_of(tensor)
        if dense is None or dense.untyped_storage()._cdata in self._seen:
            return False
        self._seen[dense.untyped_storage()._cdata] = dense  # nothing is freed, no address is used twice
        return True


def made_in(forward: Callable[[], Any]) -> Made:
    """Return what the operators of `forward` make."""
    state = torch.get_rng_state()
    made = Made()
    with made:
        forward()
    torch.set_rng_state(state)
    return made


def some(values: list[Value], share: float, seed: int) -> tuple[Value, ...]:
    """Return a share of `values`, drawn."""
    drawn = random.Random(seed)
    return tuple(value for value in values if drawn.random() < share)


def enclose(block: nn.Module, plan: BlockPlan, ledger: HostLedger | None = None) -> None:
    """Put a planned region around `block`."""
    planned = PlannedModule(block=PlannedBlock(plan=plan, ledger=ledger or HostLedger()))
    region.enclose(block, planned, holds_call=False)
