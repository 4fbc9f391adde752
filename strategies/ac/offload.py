"""`ac=offload`: keep activations in host memory between forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strategies.ac.base import ActivationCheckpointing, RegionMaker
from strategies.base import RunnableStep, StrategyError
from strategies.regions import offloading
from strategies.written import file_text

if TYPE_CHECKING:
    from torch import nn

    from strategies.regions.region import RegionCallSite


@dataclass(frozen=True, kw_only=True, slots=True)
class Offload(ActivationCheckpointing):
    """Move what autograd saves of each block to host memory, and back in backward.

    Use when: compute must not grow, and the link to host memory is fast enough to hide copies. Not on a CPU,
        where host and device are the same memory.

    Saved: on the device nothing of a block but its weights and buffers.
    Recomputed: nothing.
    Moved: every other storage that autograd saves, once there and once back: 2 x saved bytes a step.

    Of a jagged nested tensor its values are moved, and its offsets stay. Sparse tensors, nested ones that are
    not jagged and other wrappers stay where they are.

    On CUDA the host memory is pinned and copies overlap computation on a stream of their own.

    Fields:
        keep_last: number of blocks at the end that keep what they save: backward begins there. >= 0.
        least_bytes: storages below this size stay on the device, >= 0.
        share: part of the blocks, without the last `keep_last`, whose storages move, in (0, 1]. They are
            spread evenly, so that each copy has computation beside it.
        fetch_ahead: storages that backward begins to fetch before it asks for them, >= 0: more of them hide
            more of a slow link, and stand on the device meanwhile.

    Source: Ren et al. 2021, arXiv:2101.06840; `torch.autograd.graph.saved_tensors_hooks`.
    """

    keep_last: int = 0
    least_bytes: int = 0
    share: float = 1.0
    fetch_ahead: int = 2  # `host_copies.FETCH_AHEAD`, which is read without torch

    def __post_init__(self) -> None:
        """Refuse numbers below 0, and a share that is none."""
        ActivationCheckpointing.__post_init__(self)  # a slotted dataclass has no zero-argument super()
        for name in ("keep_last", "least_bytes", "fetch_ahead"):
            if getattr(self, name) < 0:
                raise StrategyError(f"ac.{name}", f"must be at least 0, got {getattr(self, name)}")
        if not 0 < self.share <= 1:
            raise StrategyError("ac.share", f"must be above 0 and at most 1, got {self.share}")

    @property
    def acts_on_each_block_alone(self) -> bool:  # type: ignore[override]
        """True where no block is kept for its place."""
        return not self.keep_last and self.share == 1

    @property
    def scales_with_batch(self) -> bool:  # type: ignore[override]
        """True where no size decides."""
        return not self.least_bytes

    def call_site(self, model: nn.Module) -> RegionCallSite:
        """Return a callable that runs `model` as one region.

        Raises:
            StrategyError: the model is checkpointed already, or blocks are kept.
        """
        if self.keep_last or self.share < 1:
            option = "ac.keep_last" if self.keep_last else "ac.share"
            problem = f"call_site makes the model one region, and {option} chooses among blocks"
            raise StrategyError("wrap_order", f"{problem}; use inside_fsdp")
        return ActivationCheckpointing.call_site(self, model)

    def _chosen(self, fqns: Sequence[str]) -> Sequence[str]:
        """Return the share of all blocks but the last.

        Raises:
            StrategyError: there are not so many, or it is less than one block.
        """
        if self.keep_last >= len(fqns):
            problem = f"is {self.keep_last}, and the model has {len(fqns)} blocks"
            raise StrategyError("ac.keep_last", f"{problem}; use at most {len(fqns) - 1}, or ac=none")
        eligible = fqns[: len(fqns) - self.keep_last]
        # a block moves where another whole one is due by then; 0.7 of 10 is 7, however a float is rounded
        due = [int(count * self.share + 1e-9) for count in range(len(eligible) + 1)]
        if not due[-1]:
            problem = f"is {self.share}, less than one of {len(eligible)} blocks"
            raise StrategyError(
                "ac.share", f"{problem}; use at least {math.ceil(1000 / len(eligible)) / 1000}"
            )
        return [fqn for fqn, before, after in zip(eligible, due, due[1:], strict=False) if after > before]

    def _file(
        self,
        header: Mapping[str, str],
        chosen: Sequence[str],
        step: Callable[[], RunnableStep],  # noqa: ARG002 (nothing runs)
    ) -> str:
        """Return the file that moves what blocks save; unlike here, copies do not overlap computation."""
        if self.least_bytes:
            problem = f"is {self.least_bytes}, which a written file has no words for; use 0"
            raise StrategyError("ac.least_bytes", problem)
        return file_text.offloading_file(chosen, **header)

    def _region_maker(self) -> RegionMaker:
        ledger = offloading.HostLedger(self.fetch_ahead)
        return lambda _: offloading.Offloading(ledger=ledger, least_bytes=self.least_bytes)
