"""The table of other people's models: a budget, a prediction, a result or a crash that is wrong is seen."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest

from bench.architectures import library_of, makers
from bench.chunking.third_party import Planned, in_time, planned

ROW = Planned(
    architecture="LlamaConfig",
    outcome="planned",
    fraction=0.5,
    unchunked_bytes=1000,
    predicted_share=0.5,
    measured_share=0.497,
    relative_difference=1e-6,
)


@pytest.mark.parametrize(
    ("row", "is_right"),
    [
        pytest.param(ROW, True, id="as claimed"),
        pytest.param(replace(ROW, measured_share=0.501), False, id="more than the budget"),
        pytest.param(replace(ROW, measured_share=0.4), False, id="far from what was predicted"),
        pytest.param(replace(ROW, relative_difference=2e-3), False, id="another result"),
        pytest.param(replace(ROW, relative_difference=float("nan")), False, id="no number"),
        pytest.param(replace(ROW, outcome="crashed", measured_share=None), False, id="a crash"),
        pytest.param(replace(ROW, outcome="too slow", measured_share=None), False, id="no plan in time"),
        pytest.param(replace(ROW, outcome="refused", measured_share=None), True, id="a refusal"),
    ],
)
def test_a_row_is_right_where_all_of_it_is(row: Planned, *, is_right: bool) -> None:
    assert row.is_right is is_right


def test_an_architecture_is_planned() -> None:
    pytest.importorskip("transformers")
    empty = Planned(architecture="transformers/DistilBertConfig", outcome="refused", fraction=0.6)
    row = planned(empty, training=False)
    assert (row.outcome, row.is_right, row.sentence) == ("planned", True, "")


@pytest.mark.parametrize(
    ("library", "count"), [("transformers", 25), ("timm", 8), ("torchvision", 5), ("diffusers", 2)]
)
def test_each_library_has_its_architectures(library: str, count: int) -> None:
    assert sum(library_of(name) == library for name in makers()) >= count


def _renames(row: Planned) -> Planned:
    return replace(row, sentence="renamed")


def _never_ends(_: Planned) -> Planned:
    while True:
        pass


def _dies(_: Planned) -> Planned:
    os._exit(3)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("run", "outcome", "sentence"),
    [
        pytest.param(_renames, "planned", "renamed", id="an answer"),
        pytest.param(_never_ends, "too slow", "more than 1 CPU seconds", id="too slow"),
        pytest.param(_dies, "crashed", "the process ended with 3", id="a process that dies"),
    ],
)
def test_each_architecture_has_a_process_and_a_limit(
    run: Callable[[Planned], Planned], outcome: str, sentence: str
) -> None:
    row = in_time(ROW, run, limit_s=1)
    assert (row.outcome, row.sentence) == (outcome, sentence)
