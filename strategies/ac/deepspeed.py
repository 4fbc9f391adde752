"""`ac=deepspeed`: activation checkpointing of DeepSpeed around each block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from strategies.foreign.variant import OfLibrary
from strategies.regions import blocks

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class Deepspeed(OfLibrary):
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

    layers_fqn: str = ""
    use_reentrant: bool = True

    def changed(self, model: nn.Module) -> Any:
        """Return what DeepSpeed makes of `model`.

        Raises:
            StrategyError: there are no such blocks, or DeepSpeed raises.
        """
        blocks.names_of_children(model, self.layers_fqn)
        return OfLibrary.changed(self, model)
