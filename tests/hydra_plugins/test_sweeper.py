"""What a glob over variants means."""

from __future__ import annotations

import pytest

from hydra_plugins.acbench.sweeper import ASKED_FOR, left_out
from strategies import ac_variants


@pytest.mark.parametrize(
    ("patterns", "meant"),
    [
        pytest.param(["*"], set(), id="all but what must be asked for"),
        pytest.param(["*e*"], set(), id="a pattern that means others too"),
        pytest.param(["compiler*"], {"compiler_budget"}, id="a pattern that means nothing else"),
        pytest.param(["none", "*_budget"], {"compiler_budget"}, id="one of several patterns asks"),
        pytest.param(
            ["*budget", "torch*"],
            {"budget", "compiler_budget", "torch_remat", "torchtitan"},
            id="both",
        ),
    ],
)
def test_a_pattern_asks_for_what_it_alone_can_mean(patterns: list[str], meant: set[str]) -> None:
    assert set(ASKED_FOR) < set(ac_variants)
    assert left_out(patterns, [*ac_variants]) == [name for name in ASKED_FOR if name not in meant]


def test_a_command_may_know_the_number_of_one() -> None:
    assert left_out(["*"], [*ac_variants], ["compiler_budget", "file"]) == ["compiler_budget", "file"]
