"""Every model of users gets its verdict: from `assert_neutral`, and from the command."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from harness.records.parity_result import PARTS
from tests.gallery.case import Case, Verdict
from tests.gallery.checking import Said, said_of_users
from tests.gallery.users.cases import CASES, WITHOUT_RNG
from tests.gallery.users.command import said_by_the_command

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch warns of is part of some cases

_ALSO = {"refused": ("refused", "differs"), "unverified": ("unverified", "refused")}
"""What a check says instead of a trial: a variant that raises differs, and weights of no seed are refused."""

_SEES_MORE = ("GlobalCounting", "FunctionState", "ProgressiveUnfreezing")
"""What the check finds and a trial does not: state that models or micro-batches in flight share."""

_INSTEAD: dict[str, Verdict] = {
    "GlobalStep": "unverified",  # the step goes on from model to model
    **dict.fromkeys(
        ("StepInSlots", "Alternating", "SwitchesWay"), "refused"
    ),  # another number of saved tensors
    # backward refuses tensors that were written to since forward read them
    **dict.fromkeys(("cached_tensor_cleared", "feature_queue_filled_after_blocks"), "refused"),
    **dict.fromkeys(  # one micro-batch is right, two in flight share what forward sets
        (
            *("ProgressiveUnfreezing", "Clipped", "running_maximum_in_every_block"),
            "caches_rebuilt_in_forward ac=selective_layer",
        ),
        "differs",
    ),
}
"""What the command says, where it is another verdict than the one about recomputation in one step."""

_BY_THE_CHECK: dict[str, Verdict] = {
    "words": "neutral",  # it takes SGD where gradients are sparse
    **dict.fromkeys(  # equal, and nothing to free in 8 columns
        (
            *(
                "CountFlops ac=selective_op",
                "OldCheckpoint ac=selective_layer",
                "dict_in_dict_out ac=selective_op",
            ),
            *("attribute_dict_with_all_states ac=selective_layer", "fused_attention ac=selective_op"),
            *("gradient_penalty", "no_inputs ac=selective_op", "sparse_embedding_made_dense ac=selective_op"),
            *("number_attribute ac=selective_op ac.save_ops=[matmul]", "vmap_ensemble"),
        ),
        "inert",
    ),
}
"""What the check says, where it is another verdict than the one about recomputation in one step."""

_FEW = (
    *("attention_mask_built_once", "gain_enclosed_by_an_activation", "slope_bound_by_a_partial"),
    *("StepInSlots", "HookThatCounts", "input_cleared_after_the_call", "SwitchesWay", "AttributeOfAFunction"),
)
_BY_COMMAND = re.compile(r"SetsContext|keywords_only|Infinite|Strict")
_STAYS = {*WITHOUT_RNG[1:], "ac=nested", "ac=offload"}

_NOT_PUT_BACK = {
    # what closures, hooks, functions, classes, modules and iterators hold
    *("ActivationThatCounts", "GainInAClosure", "HookThatCounts", "LoggingHook", "AttributeOfAFunction"),
    *("DepthOfTheClass", "class_attribute_schedule", "DefaultDtypeModel", "GlobalStep", "Scheduled"),
    *("SetsTemperature", "SetsThreadFlag", "Pushes", "names_seen_in_this_forward", "iterator_of_dilations"),
    "global_setting_for_forward_only ac=selective_op",
    # parameters
    *("Decaying", "DecayingByData", "Teacher", "weight_noise_taken_away ac=selective_layer"),
    # arguments, and attributes of tensors
    *("GeneratorAsArgument", "dataclass_argument_that_counts", "dict_argument_counts_layers ac=selective_op"),
    *("input_cleared_after_the_call", "list_argument_grows", "list_argument_popped"),
    *("tensor_in_dict_changed_in_place", "Loaded", "AsksForGradients ac=full ac.use_reentrant=true"),
}
"""What `ac.rewind` leaves as it is."""


def _rows(*few: str) -> list[Any]:
    return [pytest.param(name, marks=() if name in few else pytest.mark.matrix) for name in CASES]


@pytest.mark.parametrize("name", _rows(*_FEW))
def test_the_check_is_right(name: str) -> None:
    case = CASES[name]
    said = said_of_users(name, case)
    right = ("differs",) if name in _SEES_MORE else _ALSO.get(case.verdict, (case.verdict,))
    assert said.verdict in {*right, _INSTEAD.get(name), _BY_THE_CHECK.get(name)}, said.sentence
    assert not case.names or any(re.search(word, said.sentence) for word in case.names), said.sentence
    if case.reads is not None:
        allowed = case.reads + case.tolerated
        assert [read for read in said.late_reads if not any(re.search(each, read) for each in allowed)] == []
        assert [
            each for each in case.reads if not any(re.search(each, read) for read in said.late_reads)
        ] == []


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(
            {name: case for name, case in CASES.items() if _BY_COMMAND.fullmatch(name)},
            id="a few",
            marks=pytest.mark.slow,
        ),
        pytest.param(CASES, id="all", marks=[pytest.mark.matrix, pytest.mark.slow]),
    ],
)
def test_the_command_is_right(cases: dict[str, Case]) -> None:
    found = dict(said_by_the_command(cases))
    assert {
        name: said for name, said in found.items() if not _is_right(_by_the_command(name, cases[name]), said)
    } == {}


def _by_the_command(name: str, case: Case) -> Case:
    if name not in _INSTEAD:
        return case
    return dataclasses.replace(case, verdict=_INSTEAD[name], part="", names=())


def _is_right(case: Case, said: Said) -> bool:
    """Whether the verdict is the right one, and the sentence blames the part and the module first."""
    words = {case.part, PARTS.get(case.part)} - {"", None}
    is_part = not words or any(str(word) in said.sentence for word in words)
    is_named = not case.names or any(re.search(word, said.sentence) for word in case.names)
    is_told = said.verdict == "neutral" or bool(said.sentence)
    is_small = (
        case.verdict == "neutral" and said.verdict == "inert"
    )  # equal, and nothing to free in 8 columns
    return (said.verdict == case.verdict or is_small) and is_part and is_named and is_told


@pytest.mark.matrix
def test_what_differs_is_neutral_when_its_state_is_put_back() -> None:
    chosen = {
        name: dataclasses.replace(case, verdict="neutral", part="", names=())
        for name, case in CASES.items()
        if case.verdict == "differs" and not (_STAYS & {*case.options})
    }
    found = dict(said_by_the_command(chosen, "ac.rewind=true"))
    # inert: equal, and nothing to free in 8 columns
    assert {name for name, said in found.items() if said.verdict not in {"neutral", "inert"}} == _NOT_PUT_BACK


def test_cases_name_parts_and_say_why() -> None:
    assert {case.part for case in CASES.values()} <= {"", *PARTS}
    assert [name for name, case in CASES.items() if not case.why] == []
