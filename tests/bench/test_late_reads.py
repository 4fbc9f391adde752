"""The table of late reads: what is one, what is none, and a fault whose place the message must name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.late_reads import SETUPS, Judged, judge

ROW = Judged(
    name="a",
    expected="neutral",
    verdict="neutral",
    alarms=(),
    misses=(),
    is_named=True,
    message="",
    seconds=0.1,
)


@pytest.mark.parametrize(
    ("row", "is_right"),
    [
        pytest.param(ROW, True, id="as written down"),
        pytest.param(replace(ROW, verdict="differs"), False, id="another verdict"),
        pytest.param(replace(ROW, alarms=("x",)), False, id="a late read that is none"),
        pytest.param(replace(ROW, misses=("x",)), False, id="a late read that is not listed"),
        pytest.param(replace(ROW, is_named=False), False, id="a fault that is not named"),
    ],
)
def test_a_row_is_right_where_all_of_it_is(row: Judged, *, is_right: bool) -> None:
    assert row.is_right is is_right


@pytest.mark.parametrize(
    "name",
    [
        "attention_mask_built_once",  # right, and nothing is read late
        "gain_enclosed_by_an_activation",
        "slope_bound_by_a_partial",
        "branch_on_a_step_in_slots",
        "hook_that_counts",
        "input_cleared_after_the_call",
        "bound_method_switched",
        "attribute_of_a_function",
    ],
)
def test_a_setup_is_judged_as_written_down(name: str) -> None:
    (setup,) = (each for each in SETUPS if each.name == name)
    judged = judge(setup)
    assert judged.is_right, judged


def test_each_setup_has_a_name_of_its_own() -> None:
    names = [each.name for each in SETUPS]
    assert len(set(names)) == len(names)
    assert sum(each.verdict == "differs" for each in SETUPS) >= 20
