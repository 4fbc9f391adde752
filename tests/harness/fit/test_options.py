"""Which of several options is the answer."""

from __future__ import annotations

from typing import Any

import pytest

from harness.fit.options import Option, Proof, chosen


def option(
    variant: str, peak: int, step_s: float, *, fits: bool = True, verdict: str = "unverified"
) -> Option:
    nothing: Any = None
    return Option(
        variant=variant,
        title=variant,
        experiment=nothing,
        overrides=(f"ac={variant}",),
        peak_bytes=peak,
        saved_bytes=peak // 2,
        extra_flops=0,
        step_time_s=step_s,
        slowdown=step_s,
        fits=fits,
        bound_by="compute",
        verdict=verdict,
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param([option("none", 100, 1.0), option("full", 50, 1.3)], "none", id="the fastest that fits"),
        pytest.param([option("none", 100, 1.0, fits=False), option("full", 50, 1.3)], "full", id="what fits"),
        pytest.param(
            [option("full", 50, 1.3), option("rules", 40, 1.32)], "rules", id="fewer bytes in equal time"
        ),
        pytest.param([option("full", 50, 1.3), option("rules", 40, 1.33)], "full", id="beyond 2 % of time"),
        pytest.param(
            [option("budget", 50, 1.3), option("first_3", 51, 1.32)], "first_3", id="simpler at equal cost"
        ),
        pytest.param(
            [option("budget", 50, 1.3), option("first_3", 52, 1.32)], "budget", id="beyond 2 % of bytes"
        ),
        pytest.param(
            [option("rules", 50, 1.3), option("full", 50, 1.3)], "full", id="equal in all, full is simpler"
        ),
        pytest.param(
            [option("rules", 50, 1.2, verdict="differs"), option("full", 50, 1.3)],
            "full",
            id="what differs is none",
        ),
        pytest.param([option("full", 50, 1.3, fits=False)], None, id="nothing fits"),
        pytest.param([], None, id="no option"),
    ],
)
def test_the_rule_of_use(options: list[Option], expected: str | None) -> None:
    found = chosen(options)
    assert (found and found.variant) == expected


def test_a_row_has_the_fields_of_the_contract() -> None:
    row = option("full", 50, 1.3).to_dict()
    assert set(row) >= {
        "variant", "overrides", "peak_bytes", "saved_bytes", "extra_flops", "step_time_s", "slowdown", "fits",
        "largest_batch", "bound_by", "verdict", "proof", "file",
    }  # fmt: skip
    assert Proof(batch_size=2, steps=1, level="bitwise", words="").to_dict() == {
        "batch_size": 2,
        "steps": 1,
        "level": "bitwise",
    }
