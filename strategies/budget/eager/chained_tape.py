"""The tape of a chain, which follows blocks in a row: what they hand on is made again, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from strategies.budget.eager.block_tape import BlockTape, Fates
from strategies.budget.plan import FATES, BlockPlan, Value
from strategies.regions.host_copies import HostLedger
from strategies.regions.inner_units import units_of


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
        self._units: list[FSDPModule] = []

    def follows(self, module: nn.Module) -> None:
        """Take note that the operators from now on are those of a block of the chain."""
        super().follows(module)
        self._units += units_of(module)

    def gatherable(self) -> Sequence[FSDPModule]:
        """Return the units of all blocks so far: operators of one make what another asks for."""
        return self._units

    def pause(self, results: Iterable[Tensor], end_early: Callable[[], None]) -> None:
        """Wait for the next block, without what nobody needs of what was read from outside."""
        self._older = []
        for home in self._written_homes:
            if home.is_dead():
                home.update_tickets()
        self._written_homes = [home for home in self._written_homes if not home.is_dead()]
        for key, home in list(self._homes.items()):
            if home.is_dead():
                del self._homes[key]
        for key, home in list(self._homes.items()):
            if home.address is None and not home.is_read():
                del self._homes[key]
        super().pause(results, end_early)
