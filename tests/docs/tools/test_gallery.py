"""The page of the gallery says what its entries say, and its links lead to them."""

from __future__ import annotations

import pytest

from docs.tools.gallery import PAGE, measured, page
from tests.gallery.facts import Defect


def test_the_page_is_current() -> None:
    pytest.importorskip("transformers", reason="some entries are models of transformers")
    assert page() == PAGE.read_text("utf-8"), "run python -m docs.tools.gallery"


@pytest.mark.parametrize(
    ("facts", "told"),
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
            {"parts": (), "verdict": "inert"},
            "losses and gradients are equal, and nothing that was asked for happens",
            id="a knob without effect",
        ),
    ],
)
def test_what_was_measured_is_told(facts: dict[str, object], told: str) -> None:
    assert measured(Defect(cause="", fix="", **facts)) == told  # type: ignore[arg-type]
