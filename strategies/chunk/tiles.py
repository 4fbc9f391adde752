"""`chunk=tiles`: named modules in a given number of tiles of the sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from strategies.base import PlannedStep, StrategyError
from strategies.chunk.base import Chunking, is_trained
from strategies.chunk.planning import tiling

if TYPE_CHECKING:
    from torch import nn

    from strategies.chunk.planning import chunk_plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles(Chunking):
    """Run named modules of each block in tiles of the sequence, forward and backward.

    Use when: you compare with the tiled MLP that trainers have; `budget` finds what to cut by itself.

    Saved: in training, the inputs of the named modules.
    Recomputed: in backward, their operators, once, but for products that nobody reads.

    Fields:
        tiles: number of tiles, >= 2, by patterns of names of modules inside a block: `{feed_forward: 4}`.

    Source: Bekman et al. 2025, arXiv:2506.13996, section 3.1 (sequence tiling).
    """

    tiles: dict[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        """Refuse what is no mapping to numbers of tiles."""
        given: Any = self.tiles
        if not isinstance(given, Mapping) or not given:
            problem = f"must be a mapping from patterns of modules to numbers of tiles, got {given!r}"
            raise StrategyError("chunk.tiles", f"{problem}; for example {{feed_forward: 4}}")
        for pattern, count in given.items():
            if type(count) is not int or count < 2:  # noqa: PLR2004 (one is none)
                raise StrategyError("chunk.tiles", f"must be at least 2 for {pattern!r}, got {count!r}")
        object.__setattr__(self, "tiles", {str(pattern): count for pattern, count in given.items()})

    def plan(self, model: nn.Module, sample: tuple[Any, ...], step: PlannedStep) -> chunk_plan.ChunkPlan:
        """Return the plan of `model` with the tiles.

        Raises:
            StrategyError: as of `tiling.tiled_plan`, or nothing is trained.
        """
        if not is_trained(model):
            raise StrategyError(
                "chunk.tiles", "is for training, and the model has no backward; use chunk=budget"
            )
        return tiling.tiled_plan(model, sample, step, self.tiles or {})
