"""What `assert_neutral` says of a case."""

from __future__ import annotations

from harness.check import NotNeutral, assert_neutral
from harness.check.not_neutral import Neutrality
from tests.gallery.case import Case


def checked(case: Case, *, steps: int = 2) -> Neutrality:
    """Return what `assert_neutral` finds after so many optimizer steps."""
    assert not isinstance(case.variant, tuple), "options of the command have no model to work on"
    try:
        return assert_neutral(case.make, case.batch, case.variant, steps=steps)
    except NotNeutral as failure:
        return failure.found
