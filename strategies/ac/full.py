"""`ac=full`: recompute whole blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strategies.ac.base import Recomputing


@dataclass(frozen=True, kw_only=True, slots=True)
class Full(Recomputing):
    """Checkpoint every block.

    Use when: memory is short and a third more compute is acceptable; the first variant to try.

    Saved: the inputs of each block.
    Recomputed: the forward of all L blocks, once a step: F of the 3F FLOPs a block costs without it,
        so about a third more. With `early_stop` the operators after the last saved tensor are left out.
    Moved: nothing.

    Source: Chen et al. 2016, arXiv:1604.06174, section 4.1; `torch.utils.checkpoint`.
    """

    acts_on_each_block_alone: ClassVar[bool] = True
    scales_with_batch: ClassVar[bool] = True
