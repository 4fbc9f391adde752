"""`ac=offload`: keep activations in host memory between forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from strategies.ac.base import ActivationCheckpointing, RegionMaker
from strategies.base import RunnableStep
from strategies.regions import offloading
from strategies.written import file_text


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

    Source: Ren et al. 2021, arXiv:2101.06840; `torch.autograd.graph.saved_tensors_hooks`.
    """

    acts_on_each_block_alone: ClassVar[bool] = True
    scales_with_batch: ClassVar[bool] = True

    def _file(
        self,
        header: Mapping[str, str],
        chosen: Sequence[str],
        step: Callable[[], RunnableStep],  # noqa: ARG002 (nothing runs)
    ) -> str:
        """Return the file that moves what blocks save; unlike here, copies do not overlap computation."""
        return file_text.offloading_file(chosen, **header)

    def _region_maker(self) -> RegionMaker:
        ledger = offloading.HostLedger()
        return lambda: offloading.Offloading(ledger=ledger)
