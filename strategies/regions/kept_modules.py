"""Modules of a block by name patterns, outside of which selective-op AC keeps no results."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from strategies.base import Observation, StrategyError
from strategies.regions.region import Region


@dataclass(kw_only=True, slots=True)
class Within:
    """The place of a block's forward.

    Fields:
        depth: number of matching modules that it is in.
    """

    depth: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MatchingModule:
    """A region around a module that a pattern matches: it says when the block's forward is in it.

    Fields:
        within: the place of the forward of its block.
        block: the region around the block.
    """

    within: Within
    block: Region

    def __call__(
        self,
        module: nn.Module,  # noqa: ARG002 (`body` is bound to it)
        body: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return `body(*args, **kwargs)`."""
        self.within.depth += 1
        try:
            return body(*args, **kwargs)
        finally:
            self.within.depth -= 1

    def observe(self) -> Observation:
        """Return what the block's region showed."""
        return self.block.observe()


def matching(patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return the names inside a block that a pattern matches; `*.attn` matches `attn` too."""
    return [
        name
        for name in names
        if name and any(fnmatchcase(each, pattern) for pattern in patterns for each in (name, f".{name}"))
    ]


def refuse_unmatched(patterns: Sequence[str], blocks: Mapping[str, Iterable[str]]) -> None:
    """Refuse a pattern that matches no module of any block, with the nearest names.

    Args:
        patterns: those of `ac.keep`.
        blocks: names of the modules inside each block.

    Raises:
        StrategyError: naming the pattern.
    """
    names = [name for name in dict.fromkeys(name for inside in blocks.values() for name in inside) if name]
    for pattern in patterns:
        if matching([pattern], names):
            continue
        near = difflib.get_close_matches(pattern.strip("*."), names, n=3, cutoff=0.3)
        words = ", ".join(repr(name) for name in near or names[:6]) or "none"
        problem = f"{pattern!r} matches no module inside a block; the nearest: {words}"
        raise StrategyError("ac.keep", problem)
