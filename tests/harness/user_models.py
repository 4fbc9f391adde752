"""Modules for `model=python`: one that works, and one for every way in which a user's code fails.

Faults strike the last rank, in its first forward unless the name says otherwise.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

FOREVER_S = 600.0
_WIDTH = 16
_BLOCKS = 2


class Block(nn.Module):
    def __init__(self, before: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.up = nn.Linear(_WIDTH, 4 * _WIDTH)
        self.down = nn.Linear(4 * _WIDTH, _WIDTH)
        self.before = before

    def forward(self, x: Tensor) -> Tensor:
        self.before(self)
        output: Tensor = x + self.down(self.up(x).relu())
        return output


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = x + self.down(self.up(x).relu())
        return outputs


class SharedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Body()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = self.body(x)
        return x


def shared_block() -> Any:
    """Return a model whose one block is a plain attribute, called four times."""
    return SharedBlock(), (torch.randn(4, 8),), torch.mean


def too_large_for_any_machine(given: str) -> Any:
    """Return a model of 4 TB, which exists without memory alone, with an example or samples."""
    model = nn.Linear(1 << 20, 1 << 20, bias=False)

    def drawn(count: int) -> Any:
        return (torch.randn(count, 1 << 20),), torch.randn(count)

    if given == "samples":
        return model, drawn, lambda outputs, targets: (outputs.mean(1) * targets).sum()
    rows = torch.randn(4, 1 << 20)
    return model, (rows if given == "example" else rows[::2],), lambda outputs: outputs.mean()


class ByName(nn.Module):
    """A model that takes its input by name alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(lambda _block: None) for _ in range(_BLOCKS))

    def forward(self, *, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class SelectsByAMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(_WIDTH, _WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layers[0](x)
        return outputs[outputs > 0]


class Stack(nn.Module):
    def __init__(self, before: Callable[[nn.Module], None] = lambda _block: None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, _WIDTH)
        self.layers = nn.ModuleList(Block(before) for _ in range(_BLOCKS))
        self.head = nn.Linear(_WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def healthy() -> nn.Module:
    return Stack()


def ties_its_head() -> nn.Module:
    model = Stack()
    model.head.weight = model.embedding.weight
    return model


def regression() -> tuple[nn.Module, tuple[Tensor, ...], Callable[[Tensor], Tensor]]:
    """No language model: example inputs, a loss of its own, blocks in a Sequential."""
    blocks = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(OrderedDict(layers=nn.Sequential(*blocks)))
    return model, (torch.randn(4, _WIDTH),), lambda outputs: outputs.square().mean()


def sets_a_flag() -> nn.Module:
    """A model whose forward sets the precision of matrix products for the whole process."""
    model = Stack()
    model.register_forward_pre_hook(lambda *_: torch.set_float32_matmul_precision("high"))
    return model


def returns_an_iterator() -> tuple[nn.Module, tuple[Tensor, ...], Callable[[Iterator[Tensor]], Tensor]]:
    model, example, _ = regression()
    model.register_forward_hook(lambda _module, _inputs, outputs: iter([outputs]))
    return model, example, lambda outputs: next(outputs).square().mean()


def checkpoints_its_head() -> nn.Module:
    """A model with a checkpoint of its own, beside the blocks."""
    model = Stack()
    whole: Any = model.head.forward
    model.head.forward = partial(checkpoint, whole, use_reentrant=False, early_stop=False)  # type: ignore[method-assign]
    return model


def draws_a_width(width: int) -> nn.Module:
    return nn.Linear(width, width)


def takes_names() -> tuple[nn.Module, dict[str, Tensor], Callable[[Tensor], Tensor]]:
    return ByName(), {"x": torch.randn(4, _WIDTH)}, lambda outputs: outputs.square().mean()


def reads_values() -> nn.Module:
    """A constructor that the meta device cannot run, as of models with stochastic depth."""
    rates = [rate.item() for rate in torch.linspace(0, 0.1, _BLOCKS)]
    model = Stack()
    for layer, rate in zip(model.layers, rates, strict=True):
        layer.rate = rate
    return model


def selects_by_a_mask() -> tuple[nn.Module, tuple[Tensor, ...], Callable[[Tensor], Tensor]]:
    """A model whose rows are as many as its data has positive numbers."""
    return SelectsByAMask(), (torch.randn(4, _WIDTH),), lambda outputs: outputs.square().mean()


def draws_weights_elsewhere() -> nn.Module:
    """A model whose first weights come from the generators of NumPy and Python."""
    model = healthy()
    values = (np.random.rand(), random.random())  # noqa: NPY002 (the generator that users still call)
    for parameter, value in zip(model.parameters(), values, strict=False):
        nn.init.constant_(parameter, value)
    return model


def never_the_same() -> nn.Module:
    """A model with weights that no two calls repeat, as of threads that draw in any order."""
    model = healthy()
    nn.init.constant_(model.get_parameter("head.weight"), 0.01 * next(_numbers))
    return model


_numbers = itertools.count()


class NormedInBatch(nn.Module):
    """A block that writes statistics, which another run writes again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        """Return a function of `x` and its statistics."""
        return torch.tanh(self.norm(self.linear(x)))


class InBranches(nn.Module):
    """Blocks of one class in two containers."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.ModuleList(NormedInBatch() for _ in range(2))
        self.two = nn.ModuleList(NormedInBatch() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return what all blocks make of `x`, one after the other."""
        for block in (*self.one, *self.two):
            x = block(x)
        return x


def writes_statistics() -> tuple[nn.Module, tuple[Tensor, ...], Callable[[Tensor], Tensor]]:
    return InBranches(), (torch.randn(64, 8),), lambda outputs: outputs.square().mean()


class OfAllBefore(nn.Module):
    """A block that reads all that its caller has in a list."""

    def __init__(self, before: int) -> None:
        super().__init__()
        self.linear = nn.Linear(before, 8)

    def forward(self, found: list[Tensor]) -> Tensor:
        """Return a function of all that was found so far."""
        return torch.tanh(self.linear(torch.cat(found, dim=1)))


class Dense(nn.Module):
    """Blocks that read what those before have made, from a list that grows meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OfAllBefore(8 * number) for number in range(1, 5))

    def forward(self, x: Tensor) -> Tensor:
        """Return all that was made."""
        found = [x]
        for block in self.blocks:
            found.append(block(found))
        return torch.cat(found, dim=1)


def reads_a_growing_list() -> tuple[nn.Module, tuple[Tensor, ...], Callable[[Tensor], Tensor]]:
    return Dense(), (torch.randn(4096, 8),), lambda outputs: outputs.square().mean()


def knows_few_words() -> nn.Module:
    model = Stack()
    model.embedding = nn.Embedding(8, _WIDTH)
    return model


def raises_when_made() -> nn.Module:
    raise RuntimeError("the weights are on another machine")


def exits_when_made() -> nn.Module:
    sys.exit(3)


def hangs_when_made() -> nn.Module:
    while True:
        with contextlib.suppress(Exception):
            time.sleep(FOREVER_S)


def raises() -> nn.Module:
    return Stack(_on_last_rank(_raise))


def raises_when_called() -> nn.Module:
    return Stack(lambda _block: _raise())


def loss_raises() -> tuple[nn.Module, tuple[Tensor, ...], Callable[[Tensor], None]]:
    model, example, _ = regression()
    return model, example, lambda _outputs: _raise()


def loss_reads_a_value() -> tuple[nn.Module, tuple[Tensor, ...], Callable[[Tensor], Tensor]]:
    model, example, _ = regression()
    return model, example, lambda outputs: outputs.mean() * max(1.0, outputs.mean().item())


def mismatches_when_called() -> nn.Module:
    return Stack(lambda _block: _mismatch())


def runs_out_of_memory() -> nn.Module:
    return Stack(_on_last_rank(_out_of_memory))


def runs_out_of_memory_when_made() -> nn.Module:
    if torch.get_default_device().type != "meta":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")
    return Stack()


def kills_itself() -> nn.Module:
    return Stack(_on_last_rank(lambda: os.kill(os.getpid(), signal.SIGKILL)))


def kills_itself_in_training() -> nn.Module:
    """A model whose forward works where nobody trains it, as where stages of it are tried."""
    killed = _on_last_rank(lambda: os.kill(os.getpid(), signal.SIGKILL))
    return Stack(lambda block: killed(block) if torch.is_grad_enabled() else None)


def segfaults() -> nn.Module:
    return Stack(_on_last_rank(_segfault))


def exits() -> nn.Module:
    return Stack(_on_last_rank(lambda: os._exit(5)))


def hangs() -> nn.Module:
    return Stack(_on_last_rank(lambda: time.sleep(FOREVER_S)))


def needs_checkpointing() -> nn.Module:
    """Runs out of memory unless its blocks are checkpointed."""
    return Stack(_out_of_memory_when_plain)


def fits_once() -> nn.Module:
    """Runs out of memory where two models are alive."""
    model = Stack(_out_of_memory_beside_another)
    _alive.add(model)
    return model


_alive: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _on_last_rank(fault: Callable[[], None]) -> Callable[[nn.Module], None]:
    def before(_block: nn.Module) -> None:
        if not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1:
            fault()

    return before


def _raise() -> None:
    raise ValueError("the width is odd")


def _mismatch() -> None:
    torch.zeros(2, 3, device="meta") @ torch.zeros(2, 3, device="meta")


def _out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def _segfault() -> None:
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)


def _out_of_memory_when_plain(block: nn.Module) -> None:
    if type(block) is Block:
        _out_of_memory()


def _out_of_memory_beside_another(_block: nn.Module) -> None:
    if len(_alive) > 1:
        _out_of_memory()
