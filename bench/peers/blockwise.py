"""Peers that checkpoint whole blocks or rows of them: torch's own wrappers, and Chen's segments."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from bench.peers.workload import Peer, Workload, blocks_of
from harness.trial.assemble import Assembled

Schedule: TypeAlias = tuple["int | Schedule", ...]
"""Blocks in order: a number is a block that runs as it is, a tuple is a row of them under one checkpoint."""


def peers(layers: int) -> Iterator[Peer]:
    """Yield torch's checkpoint of every block, of every k-th, and of rows of blocks."""
    yield Peer(name="torch full", change=partial(_every, every=1))
    for every in (2, 3, 4):
        yield Peer(name="torch selective layer", setting=f"1 of {every}", change=partial(_every, every=every))
    segments = round(math.sqrt(layers))
    yield Peer(
        name="Chen sqrt(N)",
        setting=f"{segments} segments",
        change=partial(run_by, make=partial(_Segments, segments=segments)),
    )


def _every(_: Workload, trainee: Assembled, every: int) -> None:
    """Checkpoint the first of every so many blocks."""
    chosen = {id(block) for block in list(blocks_of(trainee).values())[::every]}
    wrapper = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    apply_activation_checkpointing(
        trainee.model, checkpoint_wrapper_fn=wrapper, check_fn=lambda module: id(module) in chosen
    )


def run_by(_workload: Workload, trainee: Assembled, make: Any) -> None:
    """Let one module, that `make` makes of the list of blocks, run all blocks of a trainee."""
    fqns = list(trainee.blocks)
    folder, _, _ = fqns[0].rpartition(".")
    blocks = trainee.model.get_submodule(folder)
    trainee.model.set_submodule(folder, make(blocks))


class _Row(nn.ModuleList):
    """Blocks that a model loops over as over one, under the names that they have."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__(blocks)

    def __iter__(self) -> Iterator[Any]:
        yield self.run

    def run(self, x: Tensor, *rest: Any) -> Tensor:
        """Return what the last block returns."""
        raise NotImplementedError

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks."""
        return list(self._modules.values())  # type: ignore[arg-type]


class _Segments(_Row):
    """Blocks in rows that are checkpointed; torch leaves the last row as it is."""

    def __init__(self, blocks: Sequence[nn.Module], segments: int) -> None:
        super().__init__(blocks)
        self._segments = segments

    def run(self, x: Tensor, *rest: Any) -> Tensor:
        """Return what the last block returns."""
        functions = [partial(_called, block, rest) for block in self.blocks]
        found: Tensor = checkpoint_sequential(functions, self._segments, x, use_reentrant=False)
        return found


def _called(block: nn.Module, rest: tuple[Any, ...], x: Tensor) -> Any:
    return block(x, *rest)


class Scheduled(_Row):
    """Blocks that run by a schedule.

    Args:
        blocks: all blocks.
        schedule: which of them, and which rows of them, stand under a checkpoint.
    """

    def __init__(self, blocks: Sequence[nn.Module], schedule: Schedule) -> None:
        super().__init__(blocks)
        self._schedule = schedule

    def run(self, x: Tensor, *rest: Any) -> Tensor:
        """Return what the last block returns."""
        return self._run(self._schedule, x, *rest)

    def _run(self, schedule: Schedule, x: Tensor, *rest: Any) -> Tensor:
        for each in schedule:
            if isinstance(each, int):
                x = self.blocks[each](x, *rest)
            else:
                x = checkpoint(self._run, each, x, *rest, use_reentrant=False)
        return x
