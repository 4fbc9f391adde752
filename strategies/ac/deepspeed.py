"""`ac=deepspeed`: activation checkpointing of DeepSpeed around each block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strategies.foreign.variant import OfBlocks


@dataclass(frozen=True, kw_only=True, slots=True)
class Deepspeed(OfBlocks):
    """Run each block in DeepSpeed's `checkpoint`, on any model.

    Use when: what trainers on DeepSpeed switch on is to be compared with ours; needs the extra `deepspeed`.

    Saved: the inputs of each block.
    Recomputed: the forward of all L blocks, once a step and to its end.
    Moved: nothing.

    Fields:
        layers_fqn: FQN of the container (ModuleList, ModuleDict, Sequential) whose children are the blocks.
        use_reentrant: DeepSpeed's own autograd function, which is its default; without it its
            `non_reentrant_checkpoint`.

    Source: DeepSpeed 0.19.8, `deepspeed.runtime.activation_checkpointing.checkpointing`.
    """

    package: ClassVar[str] = "deepspeed"
    installs: ClassVar[str] = "'acbench[deepspeed]'"

    use_reentrant: bool = True
