"""What README promises is examined: each claim names the tests that would fail if it were not true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_TEXT = " ".join((_ROOT / "README.md").read_text(encoding="utf-8").split())

CLAIMS = {
    "strategies on any model and any device mesh": [
        "tests/gallery/test_users.py::test_the_command_is_right",
        "tests/parity/test_fsdp.py::test_every_variant_in_every_order",
    ],
    "exact bytes, the maximum over ranks": [
        "tests/harness/trial/test_run.py::test_saved_bytes_are_what_the_variants_claim"
    ],
    "which on a CPU is the same memory": [
        "tests/harness/report/facts/test_pareto.py::test_what_a_cpu_moves_to_its_own_memory_is_on_no_front"
    ],
    "leave the loss bitwise equal, while gradients are wrong or nothing is saved": [
        "tests/parity/test_detection.py::test_a_silent_defect_is_named_although_outputs_and_loss_are_equal",
        "tests/parity/test_detection.py::test_a_save_list_that_never_matches_is_seen_by_its_counts_alone",
    ],
    "both are compared bit for bit after each step": ["tests/parity/test_matrix.py::test_is_bitwise_neutral"],
    "they are equal within what a strategy declares": [
        "tests/parity/test_sharding.py::test_is_neutral_within_tolerance"
    ],
    "the record names the first difference: step, part, name, rank, values": [
        "tests/harness/measure/parity/test_compare.py::test_the_message_names_part_item_place_rank_and_values",
        "tests/harness/measure/parity/test_compare.py::test_the_first_difference_is_the_first_in_time",
    ],
    "the strategy is enabled, but nothing that it promises happened": [
        "tests/harness/records/test_verdict.py::test_inert"
    ],
    "Gradients of inputs count, and state of modules that a step changes": [
        "tests/harness/measure/parity/test_snapshot.py::test_gradients_of_inputs_are_of_this_step",
        "tests/parity/test_first_cause.py::test_verdict_and_first_cause",
    ],
    "the plain model does not fit or does not repeat itself": [
        "tests/harness/trial/test_run.py::test_where_the_twin_does_not_fit_the_variant_is_measured_and_unverified",
        "tests/harness/trial/test_run.py::test_a_model_that_does_not_repeat_itself_is_not_blamed_on_the_variant",
    ],
    "gradients are NaN or all zero on both sides": [
        "tests/harness/measure/parity/test_compare.py::test_what_gradients_prove"
    ],
    "come from the trial's own code on fake tensors and fake ranks": [
        "tests/harness/predict/test_fake_rank.py::test_one_rank_is_predicted_to_the_byte"
    ],
    "says what differs, where, how far, and why": [
        "tests/gallery/test_verdicts.py::test_every_verdict_is_right"
    ],
    "in CI: exits with 1": ["tests/harness/report/content/test_fail_if.py::test_what_fails"],
    "A trial is named by the hash of its resolved experiment": [
        "tests/harness/command_line/test_schema.py::test_trial_id_is_the_same_whatever",
        "tests/harness/command_line/test_schema.py::test_trial_id_differs_with_every_field",
    ],
    "The same command again runs only what is missing": [
        "tests/harness/command_line/test_cli.py::test_the_same_command_again_runs_nothing"
    ],
    "runs out of memory, raises, is killed or hangs is a record of its own, and the sweep goes on": [
        "tests/harness/sweep/test_launch.py::test_memory_that_runs_out_while_building_is_out_of_memory",
        "tests/harness/sweep/test_launch.py::test_a_fault_becomes_a_record_that_names_its_rank",
        "tests/harness/sweep/test_launch.py::test_a_rank_that_hangs_is_ended_at_the_deadline_and_named",
        "tests/harness/sweep/test_launch.py::test_the_sweep_goes_on_after_every_fault",
    ],
}
"""Words of README, and the tests that examine them."""


@pytest.mark.parametrize("claim", CLAIMS)
def test_readme_still_says_so(claim: str) -> None:
    assert claim in _TEXT.replace("**", "")


@pytest.mark.parametrize("claim", CLAIMS)
def test_what_examines_it_is_there(claim: str) -> None:
    for test in CLAIMS[claim]:
        path, _, name = test.partition("::")
        assert re.search(rf"def {name}\(", (_ROOT / path).read_text(encoding="utf-8")), test
