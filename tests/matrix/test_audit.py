"""The audit: its cases name factories that exist. A few are run as users would, all with the matrix."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence

import pytest

from harness.records.parity_result import PARTS
from tests.matrix.audit import (
    ARCHITECTURES,
    MESHES,
    SETS,
    Answer,
    Case,
    answers,
    architecture,
    cases,
    rewound,
)

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


@pytest.mark.slow
def test_a_few_answers_are_right() -> None:
    full = [case for case in cases("authors") if case.overrides == ("ac=full",)]
    assert _wrong([case for case in full if _FEW.search(case.factory)]) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("is_rewound", [False, True], ids=["as it is", "rewound"])
@pytest.mark.parametrize("folder", SETS)
def test_every_answer_is_right(folder: str, is_rewound: bool) -> None:
    assert _wrong(rewound(cases(folder)) if is_rewound else cases(folder)) == []


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("config_class", ARCHITECTURES)
def test_an_architecture_is_neutral_under_every_variant(config_class: str, mesh: str) -> None:
    found = list(architecture(config_class, mesh))
    assert found
    assert [answer for answer in found if not answer.is_right] == []


def _wrong(chosen: Sequence[Case]) -> list[Answer]:
    found = list(answers(chosen))
    assert len(found) == len(chosen) > 0
    return [answer for answer in found if not answer.is_right]
