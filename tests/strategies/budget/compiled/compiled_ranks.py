"""What each rank of the pool does with a compiled plan, and the user's models that it is tried on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harness.trial.compilation import compiling
from tests.harness.composing import experiment_of
from tests.strategies.budget.compiled.compiled_pair import COMPILED, Pair

WIDTH = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Examined:
    """What one rank has seen of a planned model and its twin.

    Fields:
        unequal: parameters, gradients of a smaller batch, and generators that differ, by number.
        peak_bytes, recomputed_flops: measured, the latter beyond the twin's.
        predicted_bytes, budget_bytes, plain_bytes, extra_flops: of the plan.
        decisions: digests of graphs and kept values, by block.
        collectives, expected_collectives: of a step, planned and of the twin.
    """

    unequal: list[int]
    peak_bytes: int
    recomputed_flops: int
    predicted_bytes: int
    budget_bytes: int
    plain_bytes: int
    extra_flops: int
    decisions: tuple[Any, ...]
    collectives: dict[str, dict[str, int]]
    expected_collectives: dict[str, dict[str, int]]


def examined(rank: int, line: str, folder: Path, rows: int | None = None) -> Examined:
    """Plan, train and watch a compiled model on this rank.

    Args:
        rank: this one.
        line: overrides beside those of the executor.
        folder: where the plan goes; all ranks share it.
        rows: samples of a further, smaller batch; `None` for none.
    """
    with compiling(experiment_of(f"{COMPILED} {line}")):
        pair = Pair(line, folder, rank)
        planned, twin = pair.reports()
        found = [*pair.state], [*pair.twin_state]
        if rows is not None:
            for each, more in zip(found, pair.gradients(pair.batch(0).rows(0, rows)), strict=True):
                each.extend(more)
    equal = [torch.equal(one, other) for one, other in zip(*found, strict=True)]
    return Examined(
        unequal=[number for number, is_equal in enumerate(equal) if not is_equal],
        peak_bytes=planned.memory.peak_bytes,
        recomputed_flops=planned.work.recomputed_flops - twin.work.recomputed_flops,
        predicted_bytes=pair.plan.predicted_peak_bytes,
        budget_bytes=pair.plan.budget_bytes,
        plain_bytes=pair.plan.plain_peak_bytes,
        extra_flops=pair.plan.extra_flops,
        decisions=tuple((block.fqn, block.graph, block.keep) for block in pair.plan.blocks),
        collectives=planned.work.collectives,
        expected_collectives=twin.work.collectives,
    )


class Block(nn.Module):
    """A residual block of two linear layers."""

    hidden = 64

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, self.hidden), nn.Linear(self.hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.down(self.up(x).sin().cos())
        return made


class WideBlock(Block):
    """A block whose parameters fill several buckets of DDP."""

    hidden = 16384


class Model(nn.Module):
    """Three blocks, and a head that shares its weight with the embedding.

    Args:
        block: class of the blocks.
        frozen: numbers of blocks that are not trained.
        has_embedding: whether there are embedding and head.
    """

    def __init__(
        self, block: type[Block], frozen: tuple[int, ...] = (), *, has_embedding: bool = False
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))
        for number in frozen:
            self.blocks[number].requires_grad_(False)
        self.embedding = nn.Embedding(WIDTH, WIDTH) if has_embedding else nn.Identity()
        self.head = nn.Linear(WIDTH, WIDTH, bias=False) if has_embedding else nn.Identity()
        if has_embedding:
            self.head.weight = self.embedding.weight  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        outputs: Tensor = self.head(x)
        return outputs


def _with_example(model: nn.Module, x: Tensor | None = None) -> Any:
    return model, (torch.randn(64, WIDTH) if x is None else x,), lambda outputs: outputs.square().mean()


def first_frozen() -> Any:
    return _with_example(Model(Block, frozen=(0,)))


def second_frozen() -> Any:
    return _with_example(Model(Block, frozen=(1,)))


def tied() -> Any:
    return _with_example(Model(Block, has_embedding=True), torch.randint(WIDTH, (64,)))


def wide() -> Any:
    return _with_example(Model(WideBlock))
