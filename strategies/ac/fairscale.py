"""`ac=fairscale`: the `checkpoint_wrapper` of fairscale around each block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strategies.foreign.variant import OfBlocks


@dataclass(frozen=True, kw_only=True, slots=True)
class Fairscale(OfBlocks):
    """Let fairscale wrap each block, on any model.

    Use when: what trainers on fairscale switch on is to be compared with ours; needs the extra `fairscale`.

    Saved: the inputs of each block.
    Recomputed: the forward of all L blocks, once a step and to its end.
    Moved: with `offload_to_cpu` the inputs of each block, to host memory and back.

    Fields:
        layers_fqn: FQN of the container (ModuleList, ModuleDict, Sequential) whose children are the blocks.
        offload_to_cpu: keep the saved inputs in host memory; on a CPU nothing moves.

    Source: fairscale 0.4.13, `fairscale.nn.checkpoint.checkpoint_wrapper`.
    """

    package: ClassVar[str] = "fairscale"
    installs: ClassVar[str] = "'acbench[fairscale]'"

    offload_to_cpu: bool = False

    @property
    def unsplittable(self) -> str:
        """The name of the library, whose backward takes no `torch.autograd.grad`."""
        return "fairscale"
