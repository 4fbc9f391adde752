"""What a setup is: a model, a way to checkpoint it, and what `assert_neutral` should say of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8
ROWS = 6

Make: TypeAlias = Callable[[], nn.Module]
Variant: TypeAlias = Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """A model under checkpoints, and what is right to say of it.

    Fields:
        make: returns the plain model, which takes (ROWS, WIDTH) and returns a tensor.
        variant: lets the blocks of the model run under checkpoints.
        verdict: the verdict that it deserves.
        reads: regular expressions, one for each name that the recomputation reads late.
        tolerated: one for names that may be among the late reads and need not be.
        culprit: one for what the message must say of where the fault lies; empty where there is none.
    """

    make: Make
    variant: Variant
    verdict: str
    reads: tuple[str, ...] = ()
    tolerated: tuple[str, ...] = ()
    culprit: str = ""

    @property
    def name(self) -> str:
        """Name of the function that makes the model."""
        return self.make.__name__


class Net(nn.Module):
    """An input layer, blocks, an output layer, on (ROWS, WIDTH)."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks: Any = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        """Return the squared output of the head, (ROWS, WIDTH)."""
        return self.head(self.run(self.stem(x))).square()

    def run(self, x: torch.Tensor) -> Any:
        """Return what the last block makes of `x`."""
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    """A linear layer whose output goes through `change`, then tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        """Return (ROWS, WIDTH)."""
        return x + self.change(self.lin(x)).sin()

    def change(self, h: torch.Tensor) -> Any:
        """Return `h`; classes of users do something else."""
        return h


def rows() -> tuple[torch.Tensor]:
    """Return the batch of all setups."""
    return (torch.cos(torch.arange(ROWS * WIDTH) * 1.3).view(ROWS, WIDTH),)


def checkpointed(model: nn.Module, **options: Any) -> nn.Module:
    """Let every block run under `torch.utils.checkpoint`, non-reentrant unless `options` say otherwise."""
    for block in model.get_submodule("blocks").children():
        block.forward = partial(checkpoint, block.forward, **{"use_reentrant": False, **options})
    return model


def reentrant(model: nn.Module) -> nn.Module:
    """Let every block run under reentrant `torch.utils.checkpoint`."""
    return checkpointed(model, use_reentrant=True)


def without_rng(model: nn.Module) -> nn.Module:
    """Let every block run under `torch.utils.checkpoint` that saves no RNG state."""
    return checkpointed(model, preserve_rng_state=False)
