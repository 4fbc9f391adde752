"""Every entry of the gallery is what it says, measured by training the plain model beside it."""

from __future__ import annotations

import math
import re

import pytest

from tests.gallery.entries import CONTROLS, DEFECTS, Entry, load, loaded
from tests.gallery.facts import Control, Defect
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
    weighs = entry.facts.needs not in _COMPILING
    module = entry.module
    return side_by_side(module.make, module.batch, module.variant, weighs=weighs)


@pytest.mark.parametrize("name", rows_of(DEFECTS))
def test_a_defect_is_real_and_silent(name: str) -> None:
    entry = _entry(name)
    facts: Defect = entry.facts
    truth = _truth(entry)
    assert set(truth.parts) == set(facts.parts)
    assert not truth.raises[1], "nothing is silent about it"
    assert bool(truth.raises[0]) is ("hides_error" in facts.parts)
    if facts.gradients is not None:
        assert truth.gradients == facts.gradients or math.isclose(
            truth.gradients, facts.gradients, rel_tol=0.1
        )
    if facts.torch_says:
        assert truth.warns == facts.torch_says
    if facts.verdict == "inert":
        assert (truth.saved_bytes[1] < truth.saved_bytes[0]) is facts.saves


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
    facts: list[Defect] = [each.facts for each in loaded(DEFECTS)]
    assert [each.link for each in facts if not _LINK.fullmatch(each.link)] == []


def test_a_control_names_the_defect_that_it_looks_like() -> None:
    controls: list[Control] = [each.facts for each in loaded(CONTROLS)]
    assert {each.like for each in controls} <= {0, *(int(name[1:3]) for name in DEFECTS)}
