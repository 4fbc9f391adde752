"""Regions of a sequence of nodes: labels in, trees out, and what is no tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import StrategyError
from strategies.nested.nested_regions import (
    NestedRegion,
    Path,
    even_paths,
    filled,
    nest,
    parse_path,
    path_name,
    render,
)

PARSED: dict[str, tuple[Any, Path]] = {
    "a number": (2, (2,)),
    "zero": (0, (0,)),
    "a list": ([0, 0, 1], (0, 0, 1)),
    "a tuple": ((3, 1), (3, 1)),
    "padded once": ([0, 0, None], (0, 0)),
    "padded twice": ([4, None, None], (4,)),
    "nothing but padding": ([None, None], ()),
    "nothing": (None, ()),
    "an empty list": ([], ()),
}


@pytest.mark.parametrize(("label", "path"), PARSED.values(), ids=PARSED)
def test_a_label_is_a_path(label: Any, path: Path) -> None:
    assert parse_path(label, "here") == path


NO_PATH = "must be an index, a list of indices or null, got {}; indices are whole numbers from 0"
REFUSED_LABELS: dict[str, tuple[Any, str]] = {
    "a negative number": (-1, NO_PATH.format("-1")),
    "a negative index": ([0, -1], NO_PATH.format("[0, -1]")),
    "a switch": (True, NO_PATH.format("True")),
    "a switch in a list": ([0, False], NO_PATH.format("[0, False]")),
    "a fraction": (0.5, NO_PATH.format("0.5")),
    "a whole float": ([1.0], NO_PATH.format("[1.0]")),
    "a word": ("0", NO_PATH.format("'0'")),
    "a word in a list": ([0, "1"], NO_PATH.format("[0, '1']")),
    "a list in a list": ([[0]], NO_PATH.format("[[0]]")),
    "a mapping": ({0: 1}, NO_PATH.format("{0: 1}")),
    "a number behind null": (
        (0, None, 1),
        "must not continue behind null, got [0, None, 1]; null only pads the end",
    ),
    "a number behind nulls": (
        [None, None, 1],
        "must not continue behind null, got [None, None, 1]; null only pads the end",
    ),
}


@pytest.mark.parametrize(("label", "message"), REFUSED_LABELS.values(), ids=REFUSED_LABELS)
def test_what_is_no_label(label: Any, message: str) -> None:
    with pytest.raises(StrategyError) as error:
        parse_path(label, "ac.labels.block")
    assert str(error.value) == f"ac.labels.block: {message}"


def region(path: Sequence[int], start: int, stop: int, *regions: NestedRegion) -> NestedRegion:
    return NestedRegion(path=tuple(path), start=start, stop=stop, regions=regions)


NESTED: dict[str, tuple[list[Path], tuple[NestedRegion, ...]]] = {
    "no nodes": ([], ()),
    "no regions": ([(), ()], ()),
    "one region of all": ([(0,), (0,)], (region([0], 0, 2),)),
    "two side by side": ([(0,), (1,)], (region([0], 0, 1), region([1], 1, 2))),
    "indices in any order": ([(7,), (), (2,)], (region([7], 0, 1), region([2], 2, 3))),
    "ColossalAI's": (
        [(0, 0, 0), (0, 0), (0, 0, 1), (0, 1), (1,), ()],
        (
            region(
                [0],
                0,
                4,
                region([0, 0], 0, 3, region([0, 0, 0], 0, 1), region([0, 0, 1], 2, 3)),
                region([0, 1], 3, 4),
            ),
            region([1], 4, 5),
        ),
    ),
    "an inner index under two outer ones": (
        [(0, 0), (1, 0)],
        (region([0], 0, 1, region([0, 0], 0, 1)), region([1], 1, 2, region([1, 0], 1, 2))),
    ),
    "a region inside one of the same extent": (
        [(0, 0), (0, 0)],
        (region([0], 0, 2, region([0, 0], 0, 2)),),
    ),
    "an outer region that goes on": (
        [(0,), (0, 1), (0,)],
        (region([0], 0, 3, region([0, 1], 1, 2)),),
    ),
}


@pytest.mark.parametrize(("paths", "regions"), NESTED.values(), ids=NESTED)
def test_equal_beginnings_share_a_region(paths: list[Path], regions: tuple[NestedRegion, ...]) -> None:
    assert nest(paths, [f"n{at}" for at in range(len(paths))], "here") == regions


REMEDY = "put what is between into the region, or give the second part another index"
GAPS: dict[str, tuple[list[Path], str]] = {
    "around a node in no region": (
        [(0,), (), (0,)],
        f"region 0 ends at 'n0' and begins again at 'n2'; 'n1' stands between: {REMEDY}",
    ),
    "around two": (
        [(0,), (0,), (), (1,), (0,)],
        f"region 0 ends at 'n1' and begins again at 'n4'; 'n2', 'n3' stand between: {REMEDY}",
    ),
    "around many": (
        [(0,), *[()] * 6, (0,)],
        (
            "region 0 ends at 'n0' and begins again at 'n7'; "
            f"'n1', 'n2', 'n3', 'n4' and 2 more stand between: {REMEDY}"
        ),
    ),
    "inside a region": (
        [(2, 0), (2,), (2, 0)],
        f"region 2_0 ends at 'n0' and begins again at 'n2'; 'n1' stands between: {REMEDY}",
    ),
    "a crossing": (
        [(0,), (1,), (0,), (1,)],
        f"region 0 ends at 'n0' and begins again at 'n2'; 'n1' stands between: {REMEDY}",
    ),
}


@pytest.mark.parametrize(("paths", "message"), GAPS.values(), ids=GAPS)
def test_a_region_does_not_begin_again(paths: list[Path], message: str) -> None:
    with pytest.raises(StrategyError) as error:
        nest(paths, [f"n{at}" for at in range(len(paths))], "ac.labels")
    assert str(error.value) == f"ac.labels: {message}"


EVEN: dict[str, tuple[int, list[int], list[Path]]] = {
    "no levels": (2, [], [(), ()]),
    "one region": (3, [1], [(0,), (0,), (0,)]),
    "halves": (4, [2], [(0,), (0,), (1,), (1,)]),
    "the larger parts first": (5, [3], [(0,), (0,), (1,), (1,), (2,)]),
    "two levels": (4, [2, 2], [(0, 0), (0, 1), (1, 0), (1, 1)]),
    "an uneven inner level": (5, [2, 2], [(0, 0), (0, 0), (0, 1), (1, 0), (1, 1)]),
    "a level of one": (2, [1, 2], [(0, 0), (0, 1)]),
    "three levels": (4, [1, 2, 2], [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]),
}


@pytest.mark.parametrize(("count", "levels", "paths"), EVEN.values(), ids=EVEN)
def test_levels_split_evenly(count: int, levels: list[int], paths: list[Path]) -> None:
    assert even_paths(count, levels, "here") == tuple(paths)


TOO_MANY: dict[str, tuple[int, list[int], str]] = {
    "at once": (2, [3], "[3] asks for 3 regions of 2 blocks"),
    "of none": (0, [1], "[1] asks for 1 regions of 0 blocks"),
    "inside the smaller part": (5, [2, 3], "[3] asks for 3 regions of 2 blocks"),
}


@pytest.mark.parametrize(("count", "levels", "problem"), TOO_MANY.values(), ids=TOO_MANY)
def test_every_region_needs_a_block(count: int, levels: list[int], problem: str) -> None:
    with pytest.raises(StrategyError) as error:
        even_paths(count, levels, "ac.levels")
    assert str(error.value) == f"ac.levels: {problem}; every region needs one block at least"


FILLED: dict[str, tuple[list[Path | None], list[Path]]] = {
    "nothing to fill": ([(0,), ()], [(0,), ()]),
    "inside a region": ([(0, 1), None, (0, 1)], [(0, 1), (0, 1), (0, 1)]),
    "between two regions": ([(0,), None, (1,)], [(0,), (), (1,)]),
    "between two inside one": ([(0, 0), None, None, (0, 1)], [(0, 0), (0,), (0,), (0, 1)]),
    "before the first and behind the last": ([None, (0,), None], [(), (0,), ()]),
    "nothing known": ([None, None], [(), ()]),
    "beside a node outside": ([(0,), None, (), None, (0,)], [(0,), (), (), (), (0,)]),
}


@pytest.mark.parametrize(("paths", "expected"), FILLED.values(), ids=FILLED)
def test_a_node_without_a_path_joins_its_neighbours(paths: list[Path | None], expected: list[Path]) -> None:
    assert filled(paths) == tuple(expected)


def test_the_tree_as_text() -> None:
    names = ["a", "b", "c", "d"]
    regions = nest([(), (0,), (0, 3), ()], names, "here")
    assert render(regions, names) == "a\nregion 0\n    b\n    region 0_3\n        c\nd"
    assert render((), names[:1]) == "a"


def test_names_of_paths() -> None:
    assert [path_name(()), path_name((0,)), path_name((0, 12))] == ["", "0", "0_12"]
    assert [each.name for each in every_region(nest([(0, 1), (2,)], ["a", "b"], "here"))] == ["0", "0_1", "2"]


@st.composite
def trees(
    draw: st.DrawFn, depth: int = 0, start: int = 0, path: Path = ()
) -> tuple[int, tuple[NestedRegion, ...]]:
    """Return how many nodes there are, and regions of some of them."""
    indices = draw(st.permutations(range(4)))
    regions = []
    position = start
    for index in indices[: draw(st.integers(0, 3 if depth < 3 else 0))]:
        begin = position + draw(st.integers(0, 1))
        stop, inner = draw(trees(depth + 1, begin, (*path, index)))
        regions.append(NestedRegion(path=(*path, index), start=begin, stop=stop, regions=inner))
        position = stop
    return position + draw(st.integers(not regions, 2)), tuple(regions)


def every_region(regions: Sequence[NestedRegion]) -> Iterator[NestedRegion]:
    for region in regions:
        yield region
        yield from every_region(region.regions)


@settings(max_examples=300, deadline=None)
@given(trees())
def test_a_tree_comes_back_from_its_paths(tree: tuple[int, tuple[NestedRegion, ...]]) -> None:
    count, regions = tree
    paths: list[Path] = [()] * count
    for each in every_region(regions):  # the outer before the inner
        paths[each.start : each.stop] = [each.path] * (each.stop - each.start)
    assert nest(paths, ["n"] * count, "here") == regions
