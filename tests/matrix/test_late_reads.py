"""What `assert_neutral` says of setups whose late reads are known: verdicts, culprits, false alarms, misses.

The setups are those of `tests.gallery.users.outsider`. Of the right ones it is known what their recomputation
reads beside its inputs: a name more is a false alarm, and one less is a miss. Of the wrong ones it is known
where the fault lies.
"""

from __future__ import annotations

import re

import pytest

from harness.check import NotNeutral, assert_neutral
from harness.check.not_neutral import Neutrality
from tests.gallery.users.outsider import right, wrong
from tests.gallery.users.outsider.setups import Setup, rows

SETUPS: dict[str, Setup] = {each.name: each for each in (*right.SETUPS, *wrong.SETUPS)}

INERT = {"selective_policy"}
"""Right, and frees nothing, which has been a verdict of its own since these were written down."""


@pytest.mark.filterwarnings("ignore")  # of users' code
@pytest.mark.parametrize("name", SETUPS)
def test_a_setup_is_judged_as_written_down(name: str) -> None:
    setup = SETUPS[name]
    try:
        found: Neutrality = assert_neutral(setup.make, rows(), setup.variant)
    except NotNeutral as failure:
        found = failure.found
    known = setup.reads + setup.tolerated
    assert found.verdict == ("inert" if name in INERT else setup.verdict), found
    assert re.search(setup.culprit, str(found)), found
    assert [read for read in found.late_reads if not any(re.search(each, read) for each in known)] == []
    missed = [each for each in setup.reads if not any(re.search(each, read) for read in found.late_reads)]
    assert missed == []


def test_each_setup_has_a_name_of_its_own() -> None:
    assert len(SETUPS) == len(right.SETUPS) + len(wrong.SETUPS)
    assert sum(each.verdict == "differs" for each in SETUPS.values()) >= 20
