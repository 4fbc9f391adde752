"""The page of the gallery says what its entries say, and its links lead to them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from docs.tools.gallery import PAGE, STEPS_PAGE, measured, page, steps_page
from tests.gallery.case import Case, Evidence, Verdict


def test_the_page_is_current() -> None:
    pytest.importorskip("transformers", reason="some entries are models of transformers")
    assert page() == PAGE.read_text("utf-8"), "run python -m docs.tools.gallery"
    assert steps_page() == STEPS_PAGE.read_text("utf-8"), "run python -m docs.tools.gallery"


@pytest.mark.parametrize(
    ("shown", "told"),
    [
        pytest.param(
            {"parts": ("gradients", "buffers"), "gradients": 1.18},
            "the loss is bitwise equal, gradients are wrong by 1.2 of their norm, buffers differ",
            id="wrong gradients and buffers",
        ),
        pytest.param(
            {"gradients": float("inf")},
            "the loss is bitwise equal, gradients are missing",
            id="no gradients",
        ),
        pytest.param(
            {"parts": ("hides_error",)},
            "the plain model raises; the checkpointed one trains on",
            id="a hidden error",
        ),
        pytest.param(
            {"parts": ()},
            "losses and gradients are equal, and nothing that was asked for happens",
            id="a knob without effect",
        ),
    ],
)
def test_what_was_measured_is_told(shown: dict[str, Any], told: str) -> None:
    verdict: Verdict = "differs" if shown.get("parts", True) else "inert"
    case = Case(make=nn.Identity, variant=(), verdict=verdict, evidence=Evidence(**shown))
    assert measured(case) == told
