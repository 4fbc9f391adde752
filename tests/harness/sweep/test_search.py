"""Of the points of a sweep a search predicts a few, and learns from each what it costs."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from harness.errors import ConfigError, MissingPackageError
from harness.launchers.task import Point
from harness.predict.hardware import Hardware
from harness.records.predicted_step import Outlook
from harness.report.content.plan_table import PlannedPoint
from harness.sweep import search
from harness.sweep.search import Costs, costs_of, front, searched
from tests.harness.records_fixture import experiment, rank_result, record

NO_OPTUNA = importlib.util.find_spec("optuna") is None
SPACE: list[tuple[str, dict[str, Any]]] = [("none", {})] + [
    (ac, {option: value})
    for ac, option, values in (("selective_layer", "ac_freq", (1, 2, 4)), ("offload", "keep_last", (0, 1, 2)))
    for value in values
]


def point(ac: str, options: dict[str, Any]) -> tuple[Point, Hardware | None]:
    resolved = experiment(ac) | {"ac": {"name": ac, **options}}
    return Point(trial_id=f"{ac}{options}", resolved=resolved, experiment=None, refusal=None, yaml=""), None


POINTS = [point(ac, options) for ac, options in SPACE]


def row(candidate: tuple[Point, Hardware | None], peak: int, flops: int) -> PlannedPoint:
    result = rank_result()
    result["memory"] |= {"peak_bytes": peak}
    result["work"] |= {"forward_flops": flops, "backward_flops": 0}
    made = replace(record(candidate[0].resolved, result), time=None)
    return PlannedPoint(asked=candidate[0].resolved, record=made, outlook=Outlook(state="to run"))


def predict(candidate: tuple[Point, Hardware | None]) -> PlannedPoint:
    """Predict fewer bytes for what recomputes more, and the most for the plain model."""
    ac = candidate[0].resolved["ac"]
    if ac["name"] == "none":
        return row(candidate, 100, 100)
    if ac["name"] == "offload":
        return row(candidate, 90 + ac["keep_last"], 200)  # undercut by all others
    return row(candidate, 40 + 10 * ac["ac_freq"], 140 - 10 * ac["ac_freq"])


class Listed:
    """A study that proposes listed answers, and keeps what it is told."""

    def __init__(self, *answers: Sequence[int]) -> None:
        self.answers, self.told = list(answers), []  # type: ignore[var-annotated]
        self.asked: list[list[tuple[str, list[Any]]]] = []

    def ask(self) -> Listed:
        self.left = list(self.answers.pop(0))
        self.asked.append([])
        return self

    def number(self, name: str, values: Sequence[float]) -> int:
        self.asked[-1].append((name.partition(" of ")[0], list(values)))
        return self.left.pop(0)

    def word(self, name: str, values: Sequence[str]) -> int:
        self.asked[-1].append((name.partition(" of ")[0], list(values)))
        return self.left.pop(0)

    def tell(self, proposal: Any, costs: Costs | None) -> None:
        assert proposal is self
        self.told.append(costs)


def test_options_of_one_variant_are_no_dimension_of_another() -> None:
    study = Listed([0], [1, 2], [1, 2], [2, 0])
    rows = searched(POINTS, 3, predict, study)
    words = ("ac.name", ['"none"', '"selective_layer"', '"offload"'])
    assert study.asked == [
        [words],
        [words, ("ac.ac_freq", [1, 2, 4])],
        [words, ("ac.ac_freq", [1, 2, 4])],  # known: told again, and not predicted again
        [words, ("ac.keep_last", [0, 1, 2])],
    ]
    assert [each.record.experiment["ac"] for each in rows] == [
        {"name": "none"}, {"name": "selective_layer", "ac_freq": 4}, {"name": "offload", "keep_last": 0},
    ]  # fmt: skip
    assert study.told == [(100, 100.0), (80, 100.0), (80, 100.0), (90, 200.0)]


def test_a_study_that_proposes_nothing_new_ends() -> None:
    study = Listed(*[[0]] * 50)
    assert len(searched(POINTS, 5, predict, study)) == 1
    assert len(study.told) == 1 + 20


def test_a_point_without_a_prediction_has_no_costs() -> None:
    refused = replace(row(POINTS[0], 1, 1), record=replace(record(), memory=None, status="refused"))
    study = Listed([0])
    assert searched(POINTS, 1, lambda _: refused, study) == [refused]
    assert study.told == [None]
    assert front([refused]) == []


def test_the_costs_are_bytes_and_seconds_where_there_are_some() -> None:
    timed = replace(row(POINTS[0], 7, 1), record=record())
    assert timed.record.time is not None
    assert costs_of(timed) == (timed.record.memory.peak_bytes, timed.record.time.step_time_s.median)  # type: ignore[union-attr]


def test_the_front_is_what_nothing_undercuts() -> None:
    rows = [predict(each) for each in POINTS]
    # all six of a chain and the plain model, which has no more FLOPs than ac_freq 4 and more bytes: undercut
    names = [each.record.experiment["ac"] for each in front(rows)]
    assert names == [{"name": "selective_layer", "ac_freq": freq} for freq in (1, 2, 4)]


def test_a_search_without_optuna_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, **_: Any) -> None:
        raise MissingPackageError("search", f"needs the package {name!r}; pip install 'acbench[search]'")

    monkeypatch.setattr(search, "optional_package", missing)
    with pytest.raises(
        ConfigError, match=r"search: needs the package 'optuna'; pip install 'acbench\[search\]'"
    ):
        searched(POINTS, 1, predict)


@pytest.mark.skipif(NO_OPTUNA, reason="needs optuna: pip install 'acbench[search]'")
def test_optuna_finds_the_front_of_a_space_that_it_sees_in_part() -> None:
    many = [point("none", {})] + [
        point(ac, {option: value})
        for ac, option in (("selective_layer", "ac_freq"), ("offload", "keep_last"))
        for value in range(1, 33)
    ]
    optuna_study = importlib.import_module("harness.sweep.optuna_study")
    rows = searched(many, 30, predict, optuna_study.OptunaStudy(30))
    again = searched(many, 30, predict)
    assert [each.record.experiment["ac"] for each in rows] == [each.record.experiment["ac"] for each in again]
    assert len(rows) == 30
    kinds = [each.record.experiment["ac"]["name"] for each in rows]
    assert kinds[10:].count("selective_layer") > kinds[10:].count("offload")
