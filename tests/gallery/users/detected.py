"""Silent defects of activation checkpointing as models and variants; torch raises in none of them.

Every factory serves `model=python`. A defect and its control differ in one thing, which their names say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from strategies import Strategy

WIDTH = 16
BATCH = 8

Example = tuple[nn.Module, tuple[Tensor], Callable[[Tensor], Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SavesMutableMatmuls(Strategy):
    """Save every `mm` and switch off torch's guard against changing saved results in place.

    None of our variants can be configured so; this is torch's own option, used carelessly.

    Fields:
        layers_fqn: FQN of the container of the blocks.
    """

    layers_fqn: str = "layers"

    def apply(self, model: nn.Module, sample: tuple[Any, ...] = ()) -> nn.Module:  # noqa: ARG002 (no tracing here)
        """Return `model` with its blocks checkpointed in place."""
        contexts = partial(
            create_selective_checkpoint_contexts, [torch.ops.aten.mm.default], allow_cache_entry_mutation=True
        )
        for block in model.get_submodule(self.layers_fqn).children():
            region: Any = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
            block.forward = region
        return model


class Dropping(nn.Module):
    """Dropout between two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (B, D)."""
        outputs: Tensor = self.down(nn.functional.dropout(self.up(x), 0.5, self.training))
        return outputs


class Counting(nn.Module):
    """A result that depends on how often the block was called, when `reads` is set."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.reads = reads
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (B, D)."""
        self.calls += 1
        scale = self.calls if self.reads else 1
        outputs: Tensor = self.down(torch.sin(self.up(x) * scale))
        return outputs


class Scaling(nn.Module):
    """A matmul whose result is doubled, in place or not."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (B, D)."""
        product = self.up(x)
        doubled = product.mul_(2) if self.in_place else product.mul(2)
        outputs: Tensor = self.down(torch.sin(doubled))
        return outputs


class Normalising(nn.Module):
    """A batch normalisation, whose statistics move when it runs unless they are `frozen`."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.frozen = frozen

    def train(self, mode: bool = True) -> Normalising:
        """Set the mode; frozen statistics stay in that of evaluation."""
        super().train(mode)
        if self.frozen:
            self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (B, D)."""
        outputs: Tensor = self.norm(self.up(x))
        return outputs


class Linears(nn.Module):
    """Two linears, whose operator is `addmm` with a bias and `mm` without.

    Between them stands enough for a region that keeps both products to free something.
    """

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=bias), nn.Linear(WIDTH, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (B, D)."""
        outputs: Tensor = self.down(torch.tanh(torch.sin(torch.cos(self.up(x)))))
        return outputs


def dropping() -> Example:
    """Return blocks with dropout."""
    return _example(Dropping)


def counter_read() -> Example:
    """Return blocks that depend on a call counter."""
    return _example(lambda: Counting(reads=True))


def counter_unread() -> Example:
    """Return blocks with a call counter that nothing reads."""
    return _example(lambda: Counting(reads=False))


def in_place() -> Example:
    """Return blocks that change the result of a matmul in place."""
    return _example(lambda: Scaling(in_place=True))


def out_of_place() -> Example:
    """Return the same mathematics without the change in place."""
    return _example(lambda: Scaling(in_place=False))


def moving_statistics() -> Example:
    """Return blocks that update batch statistics."""
    return _example(lambda: Normalising(frozen=False))


def frozen_statistics() -> Example:
    """Return blocks whose batch statistics are frozen."""
    return _example(lambda: Normalising(frozen=True))


def biased() -> Example:
    """Return blocks whose linears have a bias."""
    return _example(lambda: Linears(bias=True))


def unbiased() -> Example:
    """Return blocks whose linears have none."""
    return _example(lambda: Linears(bias=False))


class _Stack(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([block(), block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = block(x)
        return x


def _example(block: Callable[[], nn.Module]) -> Example:
    return _Stack(block), (torch.randn(BATCH, WIDTH),), lambda outputs: outputs.square().mean()
