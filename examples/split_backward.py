"""Zero bubble and activation checkpointing: count the forwards of a block, by torch's checkpoint and by ours.

torch's checkpoint recomputes a region once for each backward that asks. Zero-bubble schedules take one
backward for a stage's inputs and then one for each group of parameters, so a block of four linear layers runs
1 + 1 + 4 times for a micro-batch, a Llama block 1 + 1 + 9 times
(https://github.com/pytorch/torchtitan/issues/773). Gradients are right, and nothing warns.

    python examples/split_backward.py
"""

import functools
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint

from strategies.ac.full import Full


class Block(nn.Module):
    """Four linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return the last layer's output."""
        self.forwards += 1
        for linear in self.linears:
            x = torch.tanh(linear(x))
        return x


class Stage(nn.Module):
    """Two blocks of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return the last block's output."""
        for block in self.layers:
            x = block(x)
        return x


def plain(stage: Stage) -> Stage:
    """Return the stage as it is."""
    return stage


def by_torch(stage: Stage) -> Stage:
    """Put torch's checkpoint around each block."""
    for block in stage.layers:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return stage


def once(stage: Stage) -> nn.Module:
    """Put regions around the blocks that recompute once for both parts."""
    return Full(layers_fqn="layers").apply(stage)


def micro_batch(make: Callable[[Stage], nn.Module]) -> tuple[list[int], list[Tensor]]:
    """Return the forwards of each block in forward, input part and weight part, and the gradients."""
    torch.manual_seed(0)
    stage = Stage()
    weights, x = list(stage.parameters()), torch.randn(8, 64, requires_grad=True)
    block: Block = stage.layers[0]  # type: ignore[assignment]
    y = make(stage)(x)
    first = block.forwards
    _, groups = stage_backward_input([y], [torch.ones_like(y)], [x], iter(weights))
    after_input = block.forwards
    stage_backward_weight(iter(weights), groups)
    counts = [first, after_input - first, block.forwards - after_input]
    return counts, [weight.grad for weight in weights if weight.grad is not None]


if __name__ == "__main__":
    _, expected = micro_batch(plain)
    for make in (plain, by_torch, once):
        counts, gradients = micro_batch(make)
        is_equal = all(map(torch.equal, gradients, expected))
        forwards = " + ".join(map(str, counts))
        sys.stdout.write(f"{make.__name__}: {forwards} forwards of a block, gradients equal: {is_equal}\n")
