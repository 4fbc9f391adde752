"""Modules of a block by patterns of their names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from strategies.base import StrategyError


@dataclass(kw_only=True, slots=True)
class Within:
    """The place of a block's forward, outside of whose matching modules selective-op AC keeps no results.

    Fields:
        depth: number of matching modules that it is in.
    """

    depth: int = 0

    def of(self, entries: tuple[str, ...]) -> tuple[str, ...]:
        """Return `entries`, of operators that run now, as far as they may be kept here."""
        return entries if self.depth else ()

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


def matching(patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return the names inside a block that a pattern matches; `*.attn` matches `attn` too."""
    return [
        name
        for name in names
        if name and any(fnmatchcase(each, pattern) for pattern in patterns for each in (name, f".{name}"))
    ]


def refuse_unmatched(
    patterns: Sequence[str], blocks: Mapping[str, Iterable[str]], where: str = "ac.keep"
) -> None:
    """Refuse a pattern that matches no module of any block, with the nearest names.

    Args:
        blocks: names of the modules inside each block.

    Raises:
        StrategyError: naming the pattern.
    """
    names = [name for name in dict.fromkeys(name for inside in blocks.values() for name in inside) if name]
    for pattern in patterns:
        if matching([pattern], names):
            continue
        near = difflib.get_close_matches(pattern.strip("*."), names, n=3, cutoff=0.3)
        # without a likeness, what stands directly in a block says most
        near = near or sorted(names, key=lambda name: name.count("."))[:6]
        words = ", ".join(map(repr, near)) or "none"
        problem = f"{pattern!r} matches no module inside a block; the nearest: {words}"
        raise StrategyError(where, problem)
