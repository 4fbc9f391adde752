"""The region of a planned block: what autograd saves of it is kept, moved, or made again by its operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from strategies.base import Observation, StrategyError
from strategies.budget.block_tape import BlockTape, Fates
from strategies.budget.call_sizes import difference, sizes_of
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
        allows_smaller: whether calls with smaller inputs than the planned ones keep the plan.
        is_for_training: whether the block was in training mode when it got the plan; it runs untouched in
            evaluation mode then, which has other operators.
    """

    plan: BlockPlan
    ledger: HostLedger
    allows_smaller: bool = False
    is_for_training: bool = False
    _fates: Fates = field(init=False)

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

        Raises:
            StrategyError: forward gets other sizes or runs other operators than those that were planned.
        """
        if not torch.is_grad_enabled() or (self.is_for_training and not module.training):
            return body(*args, **kwargs)
        self._refuse_other_sizes(module, args, kwargs)
        if self.plan.offload:
            self.ledger.begin_forward()
        tape = BlockTape(self._fates, self.ledger, self)
        tape.offer(tensors_in((args, kwargs)))
        try:
            with saved_tensors_hooks(tape.pack, _redeem), tape:
                results = body(*args, **kwargs)
            tape.finish()
        finally:
            tape.close()
        return results

    def _refuse_other_sizes(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a call whose sizes are not those that the plan was made for."""
        if not self.plan.sizes:
            return
        found = sizes_of(module, args, kwargs)
        unlike = difference(self.plan.sizes, found, allows_smaller=self.allows_smaller)
        if unlike is not None:
            problem = f"the plan of {self.plan.fqn!r} was {unlike}; make it again for these sizes"
            raise StrategyError("ac", problem)

    def observe(self) -> Observation:
        """Return the bytes that the latest step moved, over all regions of the ledger."""
        return Observation(offloaded_bytes=self.ledger.offloaded_bytes)


def _redeem(packed: Packed) -> Tensor:
    return packed()
