"""The toy table is exact, and a wrong number would be seen."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench import toy


def test_prints_and_writes_an_exact_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "toy.json"
    monkeypatch.setattr(sys, "argv", ["toy", "--out", str(path)])
    assert toy.main() == 0
    assert capsys.readouterr().out.count(" exact ") == len(toy.CASES)
    content = json.loads(path.read_text("utf-8"))
    assert list(content) == ["protocol", "environment", "results"]
    assert [row["backward"] for row in content["results"]] == [row[3] for row in toy.CASES]
    assert content["environment"]["torch"]


EXACT = toy.ToyStep(
    variant="full",
    early_stop=False,
    backward=12.0,
    expected_backward=12,
    saved_mib=0.0,
    expected_saved_mib=0,
    rng_state_bytes=5056,
)


@pytest.mark.parametrize(
    ("row", "is_exact"),
    [
        pytest.param(EXACT, True, id="both numbers are the expected ones"),
        pytest.param(replace(EXACT, backward=12.5), False, id="half a product too many"),
        pytest.param(replace(EXACT, saved_mib=1 / 2**20), False, id="one byte too many"),
    ],
)
def test_one_byte_or_product_too_many_is_not_exact(row: toy.ToyStep, *, is_exact: bool) -> None:
    assert row.is_exact is is_exact
