"""Every entry of the gallery is what it says, measured by training the plain model beside it."""

from __future__ import annotations

import math
import re

import pytest

from tests.gallery.entries import CONTROLS, DEFECTS, Entry, load, loaded
from tests.gallery.rows import rows_of
from tests.gallery.side_by_side import Truth, side_by_side

_MOST_LINES = 32
_COMPILING = ("compiler", "dynamo")
_LINK = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+|")


def _entry(name: str) -> Entry:
    entry = load(name)
    if isinstance(entry, str) or entry.needed:
        pytest.skip(f"needs {entry if isinstance(entry, str) else entry.needed}")
    return entry


def _truth(entry: Entry) -> Truth:
    case = entry.case
    assert not isinstance(case.variant, tuple)
    return side_by_side(case.make, case.batch, case.variant, weighs=case.needs not in _COMPILING)


@pytest.mark.parametrize("name", rows_of(DEFECTS))
def test_a_defect_is_real_and_silent(name: str) -> None:
    entry = _entry(name)
    evidence, truth = entry.case.evidence, _truth(entry)
    assert evidence is not None
    assert set(truth.parts) == set(evidence.parts)
    assert not truth.raises[1], "nothing is silent about it"
    assert bool(truth.raises[0]) is ("hides_error" in evidence.parts)
    if evidence.gradients is not None:
        assert truth.gradients == evidence.gradients or math.isclose(
            truth.gradients, evidence.gradients, rel_tol=0.1
        )
    if evidence.torch_says:
        assert truth.warns == evidence.torch_says
    if entry.case.verdict == "inert":
        assert (truth.saved_bytes[1] < truth.saved_bytes[0]) is evidence.saves


@pytest.mark.parametrize("name", rows_of(CONTROLS))
def test_a_control_is_right(name: str) -> None:
    truth = _truth(_entry(name))
    assert truth.parts == ()
    assert truth.raises == ("", "")


def test_entries_are_numbered_titled_and_short() -> None:
    entries = [*loaded(DEFECTS), *loaded(CONTROLS)]
    for names in (DEFECTS, CONTROLS):
        assert [int(name[1:3]) for name in names] == list(range(1, len(names) + 1))
    assert [each.name for each in entries if not re.fullmatch(r"[A-Z`a-z][^\n]+\.", each.title)] == []
    long = {each.name: len([line for line in each.code.splitlines() if line]) for each in entries}
    assert {name: count for name, count in long.items() if count > _MOST_LINES} == {}


def test_links_are_of_threads() -> None:
    assert [each.case.link for each in loaded(DEFECTS) if not _LINK.fullmatch(each.case.link)] == []


def test_a_control_names_the_defect_that_it_looks_like() -> None:
    numbers = {int(name[1:3]) for name in DEFECTS}
    assert {each.case.like for each in loaded(CONTROLS)} <= {0, *numbers}
