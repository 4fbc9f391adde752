"""Regions of a sequence of nodes: contiguous intervals that nest, read from labels.

The label of a node is the path of the innermost region that holds it: `0`, `[0, 1]`, or `None` for a
node in no region. Labels may be ragged, and padded with `None` to one length, as in ColossalAI's
`activation_checkpoint` annotations. Nodes with an equal beginning of their paths share that region,
so they have to stand side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import NoReturn, TypeAlias

from strategies.base import StrategyError

_SHOWN = 4  # names in a message

Path: TypeAlias = tuple[int, ...]
"""The way to a region: its index among the outermost ones, then inside each; `()` is outside of all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NestedRegion:
    """The nodes `[start, stop)`, as one region.

    Fields:
        start, stop: positions of its first node and behind its last; never empty.
        regions: the regions inside it, in order.
    """

    path: Path
    start: int
    stop: int
    regions: tuple[NestedRegion, ...] = ()

    @property
    def name(self) -> str:
        """The path as it stands in names: `0_1`."""
        return path_name(self.path)


def path_name(path: Path) -> str:
    """Return a path as one word: `0_1`."""
    return "_".join(map(str, path))


def parse_path(label: object, where: str) -> Path:
    """Return the path that a label means: an `int`, a list padded with `None`, or `None`.

    Args:
        label: as the user wrote it.
        where: configuration path of the label, for messages.

    Raises:
        StrategyError: the label is invalid, has a negative index or an index behind a `None`.
    """
    entries = label if isinstance(label, Sequence) and not isinstance(label, str) else (label,)
    path = tuple(takewhile(lambda entry: entry is not None, entries))
    if any(entry is not None for entry in entries[len(path) :]):
        problem = f"must not continue behind null, got {_shown(label)}"
        raise StrategyError(where, f"{problem}; null only pads the end")
    for entry in path:
        if type(entry) is not int or entry < 0:
            problem = f"must be an index, a list of indices or null, got {_shown(label)}"
            raise StrategyError(where, f"{problem}; indices are whole numbers from 0")
    return path


def nest(paths: Sequence[Path], names: Sequence[str], where: str) -> tuple[NestedRegion, ...]:
    """Return the outermost regions of nodes that have the given paths.

    Args:
        paths: path of each node, in the order of execution.
        where: configuration path of the labels.

    Raises:
        StrategyError: a region ends and begins again; the message names the nodes.
    """
    return tuple(_regions(paths, names, where, depth=0, start=0, stop=len(paths)))


def even_paths(count: int, levels: Sequence[int], where: str) -> tuple[Path, ...]:
    """Return the paths of `count` nodes in `levels[0]` regions, each of `levels[1]` regions, and so on.

    Sizes differ by at most one, the larger ones first. `(1,)` is one region around all nodes.

    Raises:
        StrategyError: a region would be empty.
    """
    if not levels:
        return ((),) * count
    parts, *inner = levels
    if count < parts:
        problem = f"{list(levels)} asks for {parts} regions of {count} blocks"
        raise StrategyError(where, f"{problem}; every region needs one block at least")
    sizes = [count // parts + (index < count % parts) for index in range(parts)]
    return tuple(
        (index, *path) for index, size in enumerate(sizes) for path in even_paths(size, inner, where)
    )


def filled(paths: Sequence[Path | None]) -> tuple[Path, ...]:
    """Return the paths where a node without one is in every region that holds both of its neighbours."""
    before: list[Path] = []
    latest: Path = ()
    for path in paths:
        latest = latest if path is None else path
        before.append(latest)
    after: list[Path] = []
    latest = ()
    for path in reversed(paths):
        latest = latest if path is None else path
        after.append(latest)
    return tuple(common(left, right) for left, right in zip(before, reversed(after), strict=True))


def render(regions: Sequence[NestedRegion], names: Sequence[str]) -> str:
    """Return the nodes as text, one a line, indented by the regions that hold them."""
    return "\n".join(_lines(regions, names, start=0, stop=len(names), indent=""))


def common(left: Path, right: Path) -> Path:
    """Return the path of the innermost region around both."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    return tuple(index for index, _ in pairs)


def _regions(
    paths: Sequence[Path], names: Sequence[str], where: str, *, depth: int, start: int, stop: int
) -> Iterator[NestedRegion]:
    """Yield the regions of calls `start` to `stop` at a depth of their paths, with those inside."""
    ends: dict[int, int] = {}
    inside = groupby(range(start, stop), key=lambda at: paths[at][depth] if len(paths[at]) > depth else None)
    for index, group in inside:
        if index is None:
            continue
        positions = list(group)
        first, behind = positions[0], positions[-1] + 1
        path = paths[first][: depth + 1]
        if index in ends:
            refuse_gap(path, names, ends[index], first, where)
        ends[index] = behind
        inner = _regions(paths, names, where, depth=depth + 1, start=first, stop=behind)
        yield NestedRegion(path=path, start=first, stop=behind, regions=tuple(inner))


def refuse_gap(path: Path, names: Sequence[str], end: int, begin: int, where: str) -> NoReturn:
    """Refuse a region that ends and begins again.

    Args:
        end, begin: positions behind its last node, and of the one where it begins again.
        where: configuration path of the labels.

    Raises:
        StrategyError: naming the nodes between.
    """
    between = names[end:begin]
    more = f" and {len(between) - _SHOWN} more" if len(between) > _SHOWN else ""
    listed = ", ".join(map(repr, between[:_SHOWN])) + more
    verb = "stands" if len(between) == 1 else "stand"
    remedy = "put what is between into the region, or give the second part another index"
    if where == "ac.levels":
        remedy = "use ac.levels=[1], which is one region of all, or say by ac.labels what is in a region"
    problem = f"region {path_name(path)} ends at {names[end - 1]!r} and begins again at {names[begin]!r}"
    raise StrategyError(where, f"{problem}; {listed} {verb} between: {remedy}")


def _lines(
    regions: Sequence[NestedRegion], names: Sequence[str], *, start: int, stop: int, indent: str
) -> Iterator[str]:
    position = start
    for region in regions:
        yield from (f"{indent}{name}" for name in names[position : region.start])
        yield f"{indent}region {region.name}"
        yield from _lines(region.regions, names, start=region.start, stop=region.stop, indent=f"{indent}    ")
        position = region.stop
    yield from (f"{indent}{name}" for name in names[position:stop])


def _shown(label: object) -> str:
    return repr(list(label) if isinstance(label, tuple) else label)
