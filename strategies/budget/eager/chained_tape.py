"""The tape of a chain, which follows blocks in a row: what they hand on is made again, too."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from strategies.budget.eager.block_tape import BlockTape, Fates
from strategies.budget.eager.contents import needed_operators, reads_freed
from strategies.budget.eager.group_tape import gathered
from strategies.budget.eager.slice_ticket import SliceTicket
from strategies.budget.plan import FATES, BlockPlan, Value
from strategies.regions.host_copies import HostLedger
from strategies.regions.saved_tensors import Packed
from strategies.step.late_value import given


def chained(plans: Sequence[BlockPlan]) -> BlockPlan:
    """Return the plans of the blocks of a chain as that of one call; that of a block alone as it is."""
    if len(plans) == 1:
        return plans[0]
    first, last = plans[0], plans[-1]
    begins = [sum(each.operators for each in plans[:number]) for number in range(len(plans))]

    def values(fate: str) -> tuple[Value, ...]:
        pairs = zip(begins, plans, strict=True)
        return tuple(v._replace(operator=v.operator + at) for at, each in pairs for v in getattr(each, fate))

    fates: dict[str, Any] = {fate: values(fate) for fate in FATES}
    return replace(
        first,
        fqn=f"{first.fqn} to {last.fqn}",
        modules=tuple(each.fqn for each in plans),
        operators=sum(each.operators for each in plans),
        **fates,
    )


class ChainedTape(BlockTape):
    """The tape of a chain: what an earlier block has made is made again in backward of a later one, too."""

    def __init__(self, fates: Fates, ledger: HostLedger, region: Any, *, is_exact: bool) -> None:
        super().__init__(fates, ledger, region, is_exact=is_exact)
        self._parts: list[tuple[int, weakref.ref[nn.Module]]] = []

    def follows(self, module: nn.Module) -> None:
        """Take note that the operators from now on are those of a block of the chain."""
        super().follows(module)
        self._parts.append((self._begin, weakref.ref(module)))

    def pause(self, results: Iterable[Tensor], end_early: Callable[[], None]) -> None:
        """Wait for the next block, without what nobody needs of what was read from outside."""
        for key, home in list(self._homes.items()):
            if home.is_dead():
                del self._homes[key]
        for key, home in list(self._homes.items()):
            if home.address is None and not home.is_read():
                del self._homes[key]
        super().pause(results, end_early)

    def _give(self, ticket: SliceTicket) -> Tensor:
        if self._end_early is not None:
            self._end_early()
        redeem = partial(self._redeem, ticket)
        return given(redeem, ticket.layout, ticket.device) if ticket.is_late else redeem()

    def _redeemer(self, ticket: SliceTicket) -> Packed:
        """Return what redeems a ticket; of units, those of a block whose weights are freed are gathered."""
        return partial(self._give, ticket)

    def _redeem(self, ticket: SliceTicket) -> Tensor:
        with ExitStack() as units:
            for module in self._sharded(ticket):
                units.enter_context(gathered(module))
            return ticket.redeem()

    def _sharded(self, ticket: SliceTicket) -> list[nn.Module]:
        """Return the blocks whose operators a ticket needs, where one reads weights that FSDP2 has freed."""
        modules = [(begin, module) for begin, each in self._parts if (module := each()) is not None]
        has_units = any(_is_sharded(module) for _, module in modules)
        if not has_units or ticket.content is None or not reads_freed(ticket.content):
            return []
        numbers = needed_operators([ticket.content])
        owners = {
            max(begin for begin, _ in modules if begin <= max(number, modules[0][0])) for number in numbers
        }
        return [module for begin, module in modules if begin in owners and _is_sharded(module)]


def _is_sharded(module: nn.Module) -> bool:
    return any(isinstance(each, FSDPModule) for each in module.modules())
