"""The region of a planned block: what autograd saves of it is kept, moved, or made again by its operators."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from strategies.base import Observation, StrategyError
from strategies.budget.block_tape import Beyond, BlockTape, Fates
from strategies.budget.call_sizes import OTHER_OPERATORS, difference, input_share, size_key, sizes_of
from strategies.budget.group_tape import Group
from strategies.budget.plan import BlockPlan
from strategies.estimate.tensors import tensors_in
from strategies.regions.host_copies import HostLedger
from strategies.regions.saved_tensors import Packed


@dataclass(kw_only=True, slots=True, eq=False)
class PlannedBlock:
    """A region that carries out the plan of one block.

    Saved: the storages that the plan keeps, and the inputs of the operators that run again.
    Recomputed: the operators that lead to the other storages that backward needs, each once. Python code does
        not run again, so no state of modules, Python or NumPy matters; random numbers are put back.
    Moved: the storages that the plan offloads, once to the host and once back.

    Fields:
        plan: the plan.
        ledger: the host copies of the model.
        is_for_training: whether the block was in training mode when it got the plan; it runs untouched in
            evaluation mode then, which has other operators.
        group: the group that the plan puts the block in.
    """

    plan: BlockPlan
    ledger: HostLedger
    is_for_training: bool = False
    group: Group | None = None
    _fates: Fates = field(init=False)
    _planned_key: list[Any] | None = None
    _has_warned: bool = False

    def __post_init__(self) -> None:
        self._fates = Fates.of(self.plan)

    def __call__(
        self,
        module: nn.Module,
        body: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return `body(*args, **kwargs)`, with what autograd saves of it as planned.

        Smaller inputs may have other operators, as a batch of one often has. What follows the first of them
        is kept where all of it needs no more bytes than is planned, else recomputed, and Python warns once.

        Raises:
            StrategyError: forward gets larger inputs, or runs other operators on inputs of the planned sizes.
        """
        is_other_mode = self.is_for_training and not module.training
        if self.plan.plain or is_other_mode or not torch.is_grad_enabled():
            return body(*args, **kwargs)
        beyond = self._beyond(module, args, kwargs)
        if self.plan.offload:
            self.ledger.begin_forward()
        tape = self._tape(module, beyond)
        tape.offer(tensors_in((args, kwargs)))
        try:
            with saved_tensors_hooks(tape.pack, _redeem), tape:
                results = body(*args, **kwargs)
            tape.hand_on(tensors_in(results))
            tape.finish()
        finally:
            tape.close()
        if not (tape.is_as_planned or self._has_warned):
            self._has_warned = True
            warnings.warn(OTHER_OPERATORS, stacklevel=2)
        return results

    def _tape(self, module: nn.Module, beyond: Beyond) -> BlockTape:
        if self.group is not None:
            return self.group.tape(self._fates, self.ledger, self, module, beyond=beyond)
        return BlockTape(self._fates, self.ledger, self, beyond=beyond)

    def _beyond(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Beyond:
        """Return what becomes of operators that were not planned; refuse larger inputs, other parameters."""
        planned = self.plan.sizes
        key = size_key(module, args, kwargs) if planned else None
        if key == self._planned_key:
            return Beyond.REFUSED
        found = sizes_of(module, args, kwargs)
        if found == planned:
            self._planned_key = key
            return Beyond.REFUSED
        unlike = difference(planned, found)
        if unlike is not None:
            problem = f"the plan of {self.plan.fqn!r} was {unlike}; make it again for these sizes"
            raise StrategyError("ac", problem)
        saved_bytes = input_share(planned, found) * self.plan.saved_bytes
        return Beyond.KEPT if saved_bytes <= self.plan.kept_bytes else Beyond.RECOMPUTED

    def observe(self) -> Observation:
        """Return the bytes that the latest step moved, over all regions of the ledger."""
        return Observation(offloaded_bytes=self.ledger.offloaded_bytes)


def _redeem(packed: Packed) -> Tensor:
    return packed()
