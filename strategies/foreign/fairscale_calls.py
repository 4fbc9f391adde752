"""The wrapper of fairscale around blocks; needs the extra `acbench[fairscale]`."""

from __future__ import annotations

from fairscale.nn.checkpoint import checkpoint_wrapper
from torch import nn

from strategies.regions import blocks


def switch_on(model: nn.Module, *, layers_fqn: str, offload_to_cpu: bool) -> None:
    """Let fairscale wrap each block of a container: it changes the forward of the block itself."""
    for block in blocks.children_of(model, layers_fqn).values():
        checkpoint_wrapper(block, offload_to_cpu=offload_to_cpu)
