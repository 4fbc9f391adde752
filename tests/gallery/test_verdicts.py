"""`assert_neutral` finds every defect of the gallery, and passes every control."""

from __future__ import annotations

import pytest

from harness.measure.probes.likely_causes import CAUSES
from tests.gallery.entries import CONTROLS, DEFECTS
from tests.gallery.judge import judged
from tests.gallery.rows import OF_ONE_CAUSE, rows_of

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch warns of is part of some defects

UNNAMED = frozenset({"n31_save_list_that_never_matches"})
"""Defects of which the message has no module, parameter or value: what never took place."""


@pytest.mark.parametrize("name", rows_of(DEFECTS, CONTROLS, also=OF_ONE_CAUSE))
def test_every_verdict_is_right(name: str) -> None:
    (found,) = judged([name])
    if found.verdict == "not run":
        pytest.skip(found.message)
    assert found.verdict == found.expected, found.message
    assert found.is_explained, found.message
    assert found.is_named is (name not in UNNAMED), found.message


def test_causes_name_entries() -> None:
    numbers = {number for cause in CAUSES for number in cause.numbers}
    assert numbers <= {int(name[1:3]) for name in DEFECTS}
