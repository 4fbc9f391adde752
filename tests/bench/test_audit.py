"""The audit: its cases name factories that exist. A few are run as users would, all with the matrix."""

from __future__ import annotations

import importlib
import re

import pytest

from bench.audit import SETS, Case, answers, cases
from harness.records.parity_result import PARTS

_FEW = re.compile(
    r"wrong:(counting|codebook|normalised|tallying|contextual)|right:(keyed|half|words)|unprovable:(timed|infinite|raising)"
)


@pytest.mark.parametrize("folder", SETS)
def test_cases_name_factories_and_parts(folder: str) -> None:
    listed = cases(folder)
    missing = [
        case.factory
        for case in listed
        for module, _, function in [case.factory.partition(":")]
        if not callable(getattr(importlib.import_module(f"tests.gallery.users.{module}"), function, None))
    ]
    assert missing == []
    assert {case.part for case in listed} <= {None, *PARTS}
    assert {case.expected for case in listed} <= {"neutral", "differs", "inert", "unverified", "refused"}


def _of(folder: str, *, few: bool) -> list[Case]:
    return [
        case
        for case in cases(folder)
        if not few or (case.overrides == ("ac=full",) and _FEW.search(case.factory))
    ]


@pytest.mark.parametrize(
    ("folder", "few"),
    [
        pytest.param("authors", True, id="a few", marks=pytest.mark.slow),
        *(pytest.param(folder, False, id=folder, marks=pytest.mark.matrix) for folder in SETS),
    ],
)
def test_every_answer_is_right(folder: str, few: bool) -> None:
    found = list(answers(_of(folder, few=few)))
    assert found
    assert [answer for answer in found if not answer.is_right] == []
