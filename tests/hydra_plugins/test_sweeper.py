"""What a glob over variants means."""

from __future__ import annotations

import pytest

from hydra_plugins.acbench.sweeper import ASKED_FOR, left_out
from strategies import ac_variants

BUDGET, COMPILER, FILE, PYTHON, REMAT = ASKED_FOR


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        pytest.param(["*"], [BUDGET, COMPILER, FILE, PYTHON, REMAT], id="all but what must be asked for"),
        pytest.param(["*e*"], [BUDGET, COMPILER, FILE, PYTHON, REMAT], id="a pattern that means others too"),
        pytest.param(["compiler*"], [BUDGET, FILE, PYTHON, REMAT], id="a pattern that means nothing else"),
        pytest.param(["none", "*_budget"], [BUDGET, FILE, PYTHON, REMAT], id="one of several patterns asks"),
        pytest.param(["*budget", "torch*"], [FILE, PYTHON], id="both"),
    ],
)
def test_a_pattern_asks_for_what_it_alone_can_mean(patterns: list[str], expected: list[str]) -> None:
    assert set(ASKED_FOR) < set(ac_variants)
    assert left_out(patterns, [*ac_variants]) == expected


def test_a_command_may_know_the_number_of_one() -> None:
    assert left_out(["*"], [*ac_variants], [COMPILER, FILE]) == [COMPILER, FILE]
